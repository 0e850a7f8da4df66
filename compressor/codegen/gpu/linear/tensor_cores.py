"""Products of tensor cores: device functions that a warp's 32 lanes call together.

Operands of ``mma`` lie in the registers of a warp's 32 lanes.  Of lane ``4 * g + t``, A [16, K] has rows ``g`` and
``g + 8``, B [K, 8] column ``g``, and the sums [16, 8] rows ``g`` and ``g + 8`` by columns ``2 * t`` and ``2 * t + 1``.
"""

from __future__ import annotations

from string import Template
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import call

_PRODUCT = """
// sums += A [16, $columns] B [$columns, 8] of $of.
#ifndef __CUDA_ARCH__
inline float compressor_widen_$kind($element stored) {
  $widen
}
#endif
__device__ inline void compressor_product_$kind(
    float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k$columns.row.col.f32.$kind.$kind.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  const unsigned char* all = lockstep_exchange(mine, sizeof mine);
  const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float total = 0;
    for (int from = 0; from < 4; ++from)
      for (int part = 0; part < 2; ++part)
        for (unsigned at = 0; at < 4; at += sizeof($element)) {
          $element a, b;
          memcpy(&a, all + 64 * (4 * g + from) + 4 * (2 * part + i / 2) + at, sizeof a);
          memcpy(&b, all + 64 * (4 * (2 * t + i % 2) + from) + 16 + 4 * part + at, sizeof b);
          total += compressor_widen_$kind(a) * compressor_widen_$kind(b);
        }
    sums[i] += total;
  }
#endif
}
"""
_WIDEN = """float result;
  const unsigned bits = {};
  memcpy(&result, &bits, 4);
  return result;"""
_KINDS = {  # of ``mma``: columns, elements in words and as C++ has them, and a float32 of one
    "f16": (16, "float16", "_Float16", "return (float)stored;"),
    "bf16": (16, "bfloat16", "unsigned short", _WIDEN.format("(unsigned)stored << 16")),
    "tf32": (8, "the first 19 bits of float32", "unsigned", _WIDEN.format("stored & 0xFFFFE000u")),
}

_PRODUCT_BYTES = """
// sums += A [16, 32] B [32, 8] of int8 (A of uint8 by the other function).
#ifdef __CUDA_ARCH__
#define COMPRESSOR_PRODUCT_BYTES(name, kind, type)                                                             \\
  __device__ inline void name(                                                                                 \\
      int* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {               \\
    asm("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "  \\
        "{%8, %9}, {%0, %1, %2, %3};" : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])             \\
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                               \\
  }
#else
#define COMPRESSOR_PRODUCT_BYTES(name, kind, type)                                                             \\
  __device__ inline void name(                                                                                 \\
      int* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {               \\
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};                                                         \\
    const unsigned char* all = lockstep_exchange(mine, sizeof mine);                                           \\
    const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;                                                \\
    for (int i = 0; i < 4; ++i)                                                                                \\
      for (int from = 0; from < 4; ++from)                                                                     \\
        for (int byte = 0; byte < 8; ++byte) {                                                                 \\
          int a = (kind)all[64 * (4 * g + from) + 4 * (2 * (byte / 4) + i / 2) + byte % 4];                    \\
          int b = (signed char)all[64 * (4 * (2 * t + i % 2) + from) + 16 + byte];                             \\
          sums[i] += a * b;                                                                                    \\
        }                                                                                                      \\
  }
#endif
COMPRESSOR_PRODUCT_BYTES(compressor_product_signed, signed char, "s8")
COMPRESSOR_PRODUCT_BYTES(compressor_product_unsigned, unsigned char, "u8")
"""


def product_halves(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two registers of float16."""
    _product("f16", sums, a, b)


def product_bfloats(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two registers of bfloat16."""
    _product("bf16", sums, a, b)


def product_floats(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two float32, of which 19 bits are read."""
    _product("tf32", sums, a, b)


def _product(kind: str, sums: Any, a: list[Any], b: list[Any]) -> None:
    columns, of, element, widen = _KINDS[kind]
    source = Template(_PRODUCT).substitute(columns=columns, kind=kind, of=of, element=element, widen=widen)
    T.evaluate(call(f"compressor_product_{kind}", sums, *a, *b, source=source))


def product_bytes(sums: Any, a: list[Any], b: list[Any], *, is_unsigned: bool) -> None:
    """Add to sums, a pointer to four int32, the product of four and two registers of int8 (A of uint8 if told so)."""
    name = f"compressor_product_{'un' if is_unsigned else ''}signed"
    T.evaluate(call(name, sums, *a, *b, source=_PRODUCT_BYTES))
