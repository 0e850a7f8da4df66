"""Write kernels as TIR, one file a family.

Invariant: a kernel asks an instruction set what it can do, never what it is called.
"""

from compressor.codegen.kernels.macros import read_kernels_quickly

read_kernels_quickly()
