"""Write into the graph what PyTorch does implicitly: promoted types, short forms, complex numbers.

Invariant: a rewritten graph computes the same values, of the same types.
"""
