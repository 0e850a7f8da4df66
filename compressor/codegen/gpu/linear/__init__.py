"""Linears on a GPU: codes become operands of tensor cores, for one token as for many."""
