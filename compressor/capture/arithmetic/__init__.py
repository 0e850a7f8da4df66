"""Write into the graph what PyTorch does implicitly: types that it promotes, operators that say others in short.

Invariant: a rewritten graph computes the same values, of the same types.
"""
