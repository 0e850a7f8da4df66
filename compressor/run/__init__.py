"""Do the job: from a recipe to a bundle and its lock.

Invariant: a bundle appears whole, or not at all.
"""
