"""Multiply matrices: sums whose bits do not depend on the thread count, products in bfloat16, Hadamard matrices.

Invariant: knows no format.
"""
