"""Turn a graph into kernels and the program that calls them.

Invariant: TVM is imported here and in the run-time only; knows no pass.
"""
