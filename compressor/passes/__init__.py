"""One file a pass; the file's name is its name in a recipe.

Invariant: a pass imports another only where it is built of it.
"""
