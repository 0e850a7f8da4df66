"""Write kernels as TIR, one file a family.

Invariant: a kernel asks an instruction set what it can do, never what it is called.
"""

from compressor.codegen.kernels.macros import search_by_frame

search_by_frame()
