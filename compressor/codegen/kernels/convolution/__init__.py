"""Convolve with packed weights.

Invariant: patches are laid out once, then multiplied as linears' inputs are.
"""
