"""Write kernels in WGSL, one file a family.

Invariant: within WebGPU's default limits.
"""
