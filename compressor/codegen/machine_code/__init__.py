"""Make machine code of kernels, through passes over TIR and LLVM, and keep it.

Invariant: a kernel's code depends on its TIR, the target and the versions alone.
"""
