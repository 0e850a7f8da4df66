"""Describe number formats as data, by name and as bits: the definition that kernels are checked against.

Invariant: the modules of formats as data import no torch.
"""
