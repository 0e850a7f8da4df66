"""Turn a model into a graph of few operators, weights memory-mapped.

Invariant: no code of a model's folder runs unless it was asked for by name.
"""
