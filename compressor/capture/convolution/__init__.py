"""Rewrite convolutions of every kind as linears over patches.

Invariant: what is neither a linear over patches nor depthwise stays as the model has it, and is named.
"""
