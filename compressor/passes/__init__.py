"""Passes, one per file; the file's name is the pass's name in a recipe.

Invariant: a pass imports another only if it is built on it.
"""
