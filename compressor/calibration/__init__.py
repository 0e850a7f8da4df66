"""Run samples through a graph segment by segment, for statistics and gradients.

Invariant: one segment and its statistics are in memory, whatever the model's size.
"""
