"""Choose a recipe for a model, a target and a budget: candidates are planned, measured and compared.

Invariant: runs recipes as they are, and computes nothing that a recipe does not.
"""
