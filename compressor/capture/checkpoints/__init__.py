"""Read the checkpoints of other tools as dense weights: packed codes and scales become values, one tensor at a time.

Invariant: a weight has one value, its format's definition; no weight is read before it is asked for.
"""
