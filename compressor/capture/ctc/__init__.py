"""Capture models that give each frame of a sound a token (CTC), as modules of one input.

Invariant: what a weight norm computes is computed once, when weights are read.
"""
