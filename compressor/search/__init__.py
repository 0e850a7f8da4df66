"""Make choices under a budget.

Invariant: knows costs and losses, not how they were measured.
"""
