"""Score predictions of a model token by token, alone and against those of the dense model.

Invariant: scores are of logits that somebody else computes; nothing here runs a kernel.
"""
