"""Keep tensors where kernels compute: in this machine's memory, or on a GPU.

Invariant: what is not about a device is written once, for all of them.
"""
