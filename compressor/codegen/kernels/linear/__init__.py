"""Multiply by dense and packed weights.

Invariant: the packed storage is read as it lies.
"""
