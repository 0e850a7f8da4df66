"""Train what drafts tokens for a model that stays as it is.

Invariant: no weight of the model changes.
"""
