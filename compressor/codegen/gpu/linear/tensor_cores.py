"""Device functions of linears: products by tensor cores, loads, and the steps from codes to a product's operands.

Operands of ``mma`` lie in the registers of a warp's 32 lanes.  Of lane ``4 * g + t``, A [16, K] has rows ``g`` and
``g + 8``, B [K, 8] column ``g``, and the sums [16, 8] rows ``g`` and ``g + 8`` by columns ``2 * t`` and ``2 * t + 1``.
"""

from __future__ import annotations

from hashlib import md5
from itertools import accumulate
from math import prod
from typing import Any

from tvm.script import tirx as T

_HALVES = """
// Two float16 in one register, the first in its low bits.
__device__ inline unsigned compressor_half2(float low, float high) {
  unsigned result;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  _Float16 both[2] = {(_Float16)low, (_Float16)high};
  memcpy(&result, both, 4);
#endif
  return result;
}
__device__ inline float compressor_low_half(unsigned both) {
#ifdef __CUDA_ARCH__
  float result;
  asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(both));
  return result;
#else
  _Float16 low;
  memcpy(&low, &both, 2);
  return (float)low;
#endif
}
__device__ inline unsigned compressor_subtract_halves(unsigned a, unsigned b) {
  unsigned result;
#ifdef __CUDA_ARCH__
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
  _Float16 x[2], y[2];
  memcpy(x, &a, 4), memcpy(y, &b, 4);
  x[0] -= y[0], x[1] -= y[1];
  memcpy(&result, x, 4);
#endif
  return result;
}
"""

_BYTES = """
// Four of the eight bytes of b:a, byte i chosen by the selector's four bits from bit 4 * i on.
__device__ inline unsigned compressor_pick_bytes(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
#endif
}
"""

_POINTER = """
template <typename A>
__device__ inline A* compressor_choose(bool is_first, A* first, A* second) { return is_first ? first : second; }
"""

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

_LOADS = """
// Loads past the first-level cache, of what is read once.
__device__ inline void compressor_stream2(int* to, const int* from) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
#else
  to[0] = from[0], to[1] = from[1];
#endif
}
__device__ inline int compressor_stream_word(const void* from) {
#ifdef __CUDA_ARCH__
  int word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
#else
  return *(const int*)from;
#endif
}
__device__ inline int compressor_stream_pair(const void* from) {
#ifdef __CUDA_ARCH__
  unsigned short pair;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(pair) : "l"(from));
  return pair;
#else
  return *(const unsigned short*)from;
#endif
}
"""

_LANES = """
// Over `count` neighbouring lanes, a power of two; all 32 lanes must call them.
__device__ inline float compressor_lanes_sum(float value, int count) {
  for (int step = count / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}
__device__ inline float compressor_lanes_max(float value, int count) {
  for (int step = count / 2; step > 0; step /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, step);
    value = other > value || other != other ? other : value;
  }
  return value;
}
"""

_COPIES = """
// Copies of 16 bytes from global to shared memory, which go on beside what follows.
__device__ inline void compressor_copy16(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
      : "memory");
#else
  memcpy(to, from, 16);
#endif
}
__device__ inline void compressor_copies_end() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Newer>
__device__ inline void compressor_copies_wait() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" :: "n"(Newer) : "memory");
#endif
}
"""


def half2(low: Any, high: Any) -> Any:
    """Return two float32 as float16 in one uint32, rounded to nearest."""
    return call("compressor_half2", low, high, source=_HALVES, kind="uint32")


def low_half(both: Any) -> Any:
    """Return the float16 in the low bits of a uint32, as float32."""
    return call("compressor_low_half", both, source=_HALVES, kind="float32")


def subtract_halves(a: Any, b: Any) -> Any:
    """Subtract two pairs of float16."""
    return call("compressor_subtract_halves", a, b, source=_HALVES, kind="uint32")


def pick_bytes(a: Any, b: Any, selector: int) -> Any:
    """Pick four of the eight bytes of two uint32, as ``__byte_perm`` does."""
    return call("compressor_pick_bytes", a, b, T.uint32(selector), source=_BYTES, kind="uint32")


def choose(is_first: Any, first: Any, second: Any) -> Any:
    """Return one of two pointers."""
    return call("compressor_choose", is_first, first, second, source=_POINTER, kind=first.ty)


def product_halves(sums: Any, a: list[Any], b: list[Any]) -> None:
    """Add to sums, a pointer to four float32, the product of four and two registers of float16."""
    T.evaluate(call("compressor_product_halves", sums, *a, *b, source=_PRODUCT_HALVES))


def product_bytes(sums: Any, a: list[Any], b: list[Any], *, is_unsigned: bool) -> None:
    """Add to sums, a pointer to four int32, the product of four and two registers of int8 (A of uint8 if told so)."""
    name = f"compressor_product_{'un' if is_unsigned else ''}signed"
    T.evaluate(call(name, sums, *a, *b, source=_PRODUCT_BYTES))


def stream(to: Any, at: Any) -> None:
    """Load two int32 from a global address to a pointer."""
    T.evaluate(call("compressor_stream2", to, at, source=_LOADS))


def stream_word(at: Any) -> Any:
    """Load 32 bits from a global address, as int32."""
    return call("compressor_stream_word", at, source=_LOADS, kind="int32")


def stream_pair(at: Any) -> Any:
    """Load 16 bits from a global address, as int32."""
    return call("compressor_stream_pair", at, source=_LOADS, kind="int32")


def lanes_sum(value: Any, count: int) -> Any:
    """Return the sum of a float32 over ``count`` neighbouring lanes, a power of two; all 32 lanes must call it."""
    return call("compressor_lanes_sum", value, T.int32(count), source=_LANES, kind="float32")


def lanes_max(value: Any, count: int) -> Any:
    """Return the largest float32 of ``count`` neighbouring lanes, or NaN; all 32 lanes must call it."""
    return call("compressor_lanes_max", value, T.int32(count), source=_LANES, kind="float32")


def copy16(to: Any, at: Any) -> None:
    """Begin to copy 16 bytes to shared memory."""
    T.evaluate(call("compressor_copy16", to, at, source=_COPIES))


def end_copies() -> None:
    """End a group of copies."""
    T.evaluate(call("compressor_copies_end", source=_COPIES))


def wait_copies(newer: int) -> None:
    """Wait for all groups of copies but the newest ``newer``."""
    T.evaluate(call(f"compressor_copies_wait<{newer}>", source=_COPIES))


def held(value: Any) -> Any:
    """Keep a value in a register; TVM's own variables cannot hold what is read from shared memory."""
    register = T.alloc_buffer((1,), str(value.ty.dtype), scope="local")
    T.buffer_store(register, value, [0])
    return register[0]


def shared(*buffers: tuple[tuple[int, ...], str]) -> list[Any]:
    """Allocate shared memory of a block, one buffer of 32-bit elements for each shape and type; once in a kernel.

    TVM's own search for places takes buffers whose first use is under a condition for missing.
    """
    sizes = [-(-prod(shape) // 4) * 4 for shape, _ in buffers]
    pool = T.alloc_buffer((sum(sizes),), "uint32", scope="shared.dyn")
    places = [0, *accumulate(sizes)]
    return [
        T.decl_buffer(shape, kind, data=pool.data, elem_offset=place, scope="shared.dyn")
        for (shape, kind), place in zip(buffers, places, strict=False)
    ]


def call(name: str, *arguments: Any, source: str, kind: Any = "void") -> Any:
    """Return a call of a device function that ``source`` defines."""
    guard = f"COMPRESSOR_{md5(source.encode(), usedforsecurity=False).hexdigest()}"  # TVM repeats it for each name
    source = f"#ifndef {guard}\n#define {guard}\n{source}\n#endif\n"
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=kind)
