"""WebAssembly's vectors of 128 bits, as an instruction set; TVM is imported when a kernel is written."""

from __future__ import annotations

from typing import Any

from compressor.codegen.isa import Isa


def _dot16(acc: Any, codes: Any, activation: Any, _bits: int) -> Any:
    """Multiply 16-bit numbers and add them by pairs, which is what WebAssembly has."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.vector import splat

    eight = T.broadcast(T.int16(8), 8)

    def halves(value: Any) -> Any:
        return T.reinterpret(value, dtype="int16x8")

    unsigned, signed = halves(codes), halves(activation)
    low = T.bitwise_and(unsigned, T.broadcast(T.int16(255), 8))
    high = halves(T.bitwise_and(T.shift_right(codes, splat(8, 4)), splat(0x00FF00FF, 4)))
    pairs_of = (
        (low, T.shift_right(T.shift_left(signed, eight), eight)),
        (high, T.shift_right(signed, eight)),
    )
    for one, other in pairs_of:
        acc = _dot2(acc, one, other)
    return acc


def _dot2(acc: Any, one: Any, other: Any) -> Any:
    from tvm.script import tirx as T

    name = T.llvm_lookup_intrinsic_id("llvm.wasm.dot")
    pairs = (T.reinterpret(value, dtype="int16x8") for value in (one, other))
    return acc + T.call_llvm_pure_intrin(name, *pairs, dtype="int32x4")


def _byte_floats(value: Any) -> Any:
    """Set the exponent of 2 ** 23, whose floats have steps of one: LLVM converts each lane that was a byte alone."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.vector import VECTOR, splat, splat_float

    bits = T.bitwise_or(value, splat(0x4B000000, VECTOR))
    return T.reinterpret(bits, dtype=f"float32x{VECTOR}") - splat_float(2.0**23, VECTOR)


SIMD128 = Isa("simd128", 4, mattr=("+simd128", "+bulk-memory"), dot4=_dot16, dot2=_dot2, byte_floats=_byte_floats)
"""WebAssembly's vectors; what it has no conversion for, float16, :mod:`compressor.codegen.web.wasm` writes out."""
