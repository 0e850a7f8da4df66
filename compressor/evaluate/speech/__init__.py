"""Measure models of speech: the words and characters that they get wrong, and how alike they are to the dense model.

Invariant: what a bundle hears is computed by the bundle's own run-time, from samples.
"""
