"""Attention on GPUs: of one token with its keys divided over blocks, and of tiles of tokens through shared memory.

Invariant: every score is computed once, and no more than a tile of them is held.
"""
