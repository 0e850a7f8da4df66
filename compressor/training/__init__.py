"""Train chosen weights of a captured graph for a short time: gradients, a loop, losses, masks.

Invariant: ends no worse on held-out samples than it began, and zeros stay zeros.
"""
