"""Run on CUDA GPUs: kernels of blocks of threads, and schedules for the functions outside their families.

Invariant: the sizes of a launch depend on shapes only, so that a captured graph of one step may be replayed.
"""
