"""Convert operators of the FX graph to calls of WGSL kernels.

Invariant: what has no kernel is refused by name, before any work.
"""
