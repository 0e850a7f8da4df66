"""Products of tensor cores: device functions that a warp's 32 lanes call together.

Operands of ``mma`` lie in the registers of a warp's 32 lanes.  Of lane ``4 * g + t``, A [16, K] has rows ``g`` and
``g + 8``, B [K, 8] column ``g``, and the sums [16, 8] rows ``g`` and ``g + 8`` by columns ``2 * t`` and ``2 * t + 1``.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.memory import call

_PRODUCT_HALVES = """
// sums += A [16, 16] B [16, 8] of float16.
__device__ inline void compressor_product_halves(
    float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  const unsigned char* all = lockstep_exchange(mine, sizeof mine);
  const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float total = 0;
    for (int from = 0; from < 4; ++from)
      for (int part = 0; part < 2; ++part) {
        _Float16 a[2], b[2];
        memcpy(a, all + 64 * (4 * g + from) + 4 * (2 * part + i / 2), 4);
        memcpy(b, all + 64 * (4 * (2 * t + i % 2) + from) + 16 + 4 * part, 4);
        total += (float)a[0] * (float)b[0] + (float)a[1] * (float)b[1];
      }
    sums[i] += total;
  }
#endif
}
"""

_PRODUCT_BFLOATS = """
// sums += A [16, 16] B [16, 8] of bfloat16.
__device__ inline void compressor_product_bfloats(
    float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  const unsigned char* all = lockstep_exchange(mine, sizeof mine);
  const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float total = 0;
    for (int from = 0; from < 4; ++from)
      for (int part = 0; part < 4; ++part) {
        unsigned short a, b;
        memcpy(&a, all + 64 * (4 * g + from) + 4 * (part / 2 * 2 + i / 2) + part % 2 * 2, 2);
        memcpy(&b, all + 64 * (4 * (2 * t + i % 2) + from) + 16 + 2 * part, 2);
        unsigned wide[2] = {unsigned(a) << 16, unsigned(b) << 16};
        float both[2];
        memcpy(both, wide, 8);
        total += both[0] * both[1];
      }
    sums[i] += total;
  }
#endif
}
"""

_PRODUCT_FLOATS = """
// sums += A [16, 8] B [8, 8] of the first 19 bits of float32.
__device__ inline void compressor_product_floats(
    float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  for (unsigned& one : mine) one &= 0xFFFFE000;
  const unsigned char* all = lockstep_exchange(mine, sizeof mine);
  const int g = lockstep_lane() / 4, t = lockstep_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float total = 0;
    for (int from = 0; from < 4; ++from)
      for (int part = 0; part < 2; ++part) {
        float a, b;
        memcpy(&a, all + 64 * (4 * g + from) + 4 * (2 * part + i / 2), 4);
        memcpy(&b, all + 64 * (4 * (2 * t + i % 2) + from) + 16 + 4 * part, 4);
        total += a * b;
      }
    sums[i] += total;
  }
#endif
}
"""

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
    T.evaluate(call("compressor_product_halves", sums, *a, *b, source=_PRODUCT_HALVES))


def product_bfloats(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two registers of bfloat16."""
    T.evaluate(call("compressor_product_bfloats", sums, *a, *b, source=_PRODUCT_BFLOATS))


def product_floats(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two float32, of which 19 bits are read."""
    T.evaluate(call("compressor_product_floats", sums, *a, *b, source=_PRODUCT_FLOATS))


def product_bytes(sums: Any, a: list[Any], b: list[Any], *, is_unsigned: bool) -> None:
    """Add to sums, a pointer to four int32, the product of four and two registers of int8 (A of uint8 if told so)."""
    name = f"compressor_product_{'un' if is_unsigned else ''}signed"
    T.evaluate(call(name, sums, *a, *b, source=_PRODUCT_BYTES))
