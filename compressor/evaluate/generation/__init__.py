"""Measure what a decoder writes on its own: how long it writes what the dense model does, and how it repeats itself.

Invariant: a bundle's continuations come from its own kernels, step by step, through its caches.
"""
