"""How bits of masks and codes lie where they are not tiles of interleaved words.

Invariant: each function has one that undoes it exactly.
"""
