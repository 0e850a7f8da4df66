"""Convert operators of the FX graph, as TVM's importer asks: ours to calls of kernels, PyTorch's where TVM's fail.

Invariant: equal kernels are generated once.
"""
