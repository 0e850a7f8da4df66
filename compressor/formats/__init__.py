"""Describe number formats as data, by name and as bits: what kernels are held to.

Invariant: the modules of formats as data import no torch.
"""
