"""Linears on a GPU whose weights are left out in part: single ones of every few, or columns of a tile of rows.

Invariant: what is left out is not stored, and is neither read nor expanded in memory.
"""
