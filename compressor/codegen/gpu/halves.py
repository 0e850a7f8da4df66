"""Numbers of 16 bits, two in a register: conversions, arithmetic and picking bytes, on a GPU."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import call

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
__device__ inline unsigned compressor_multiply_add_halves(unsigned a, unsigned b, unsigned c) {
  unsigned result;
#ifdef __CUDA_ARCH__
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#else
  _Float16 x[2], y[2], z[2];
  memcpy(x, &a, 4), memcpy(y, &b, 4), memcpy(z, &c, 4);
  for (int i = 0; i < 2; ++i) x[i] = (_Float16)((float)x[i] * (float)y[i] + (float)z[i]);
  memcpy(&result, x, 4);
#endif
  return result;
}
"""

_BFLOATS = """
// Two bfloat16 in one register, the first in its low bits.
__device__ inline unsigned compressor_bfloat2(float low, float high) {
  unsigned result;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  unsigned bits[2];
  memcpy(bits, &low, 4), memcpy(bits + 1, &high, 4);
  for (int i = 0; i < 2; ++i) {
    bool is_nan = (bits[i] & 0x7FFFFFFF) > 0x7F800000;
    bits[i] = is_nan ? 0x7FFF : (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) >> 16;
  }
  result = bits[1] << 16 | bits[0];
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


def half2(low: Any, high: Any) -> Any:
    """Return two float32 as float16 in one uint32, rounded to nearest."""
    return call("compressor_half2", low, high, source=_HALVES, kind="uint32")


def low_half(both: Any) -> Any:
    """Return the float16 in the low bits of a uint32, as float32."""
    return call("compressor_low_half", both, source=_HALVES, kind="float32")


def subtract_halves(a: Any, b: Any) -> Any:
    """Subtract two pairs of float16."""
    return call("compressor_subtract_halves", a, b, source=_HALVES, kind="uint32")


def multiply_add_halves(a: Any, b: Any, c: Any) -> Any:
    """Multiply two pairs of float16 and add a third."""
    return call("compressor_multiply_add_halves", a, b, c, source=_HALVES, kind="uint32")


def bfloat2(low: Any, high: Any) -> Any:
    """Return two float32 as bfloat16 in one uint32, rounded to nearest."""
    return call("compressor_bfloat2", low, high, source=_BFLOATS, kind="uint32")


def low_bfloat(both: Any) -> Any:
    """Return the bfloat16 in the low bits of a uint32, as float32."""
    return T.reinterpret(T.shift_left(both, T.uint32(16)), dtype="float32")


def first_bits(value: Any) -> Any:
    """Return the bits of a float32 that tensor cores read, in a uint32: sign, exponent, and ten of the mantissa."""
    return T.bitwise_and(T.reinterpret(value, dtype="uint32"), T.uint32(0xFFFFE000))


def pick_bytes(a: Any, b: Any, selector: Any) -> Any:
    """Pick four of the eight bytes of two uint32, as ``__byte_perm`` does."""
    return call("compressor_pick_bytes", a, b, T.Cast("uint32", selector), source=_BYTES, kind="uint32")
