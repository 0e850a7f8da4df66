"""Measure quality and speed of models and bundles, and hold gates against them.

Invariant: a bundle's figures are measured on its own kernels.
"""
