"""One file a target; the file's name is its name in a recipe.

Invariant: a target imports no other.
"""
