"""Linears on a GPU: codes become operands of tensor cores, for one token as for many.

Invariant: weights are read as they are stored, with the layout that CPUs read.
"""
