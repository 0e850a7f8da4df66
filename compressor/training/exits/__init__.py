"""Train exits of a decoder, and calibrate from which confidence on they speak.

Invariant: whatever is random follows from the seed and the number of the batch.
"""
