"""Measure quality and speed of models and bundles, and hold gates against them.

Invariant: figures are those of a bundle's own kernels.
"""
