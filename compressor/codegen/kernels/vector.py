"""Vector expressions that the kernel families share: one place for instruction sets and float formats.

Every function takes and returns TIR expressions over vectors of ``lanes`` 32-bit elements.

A row's bits must not depend on the rows beside it, in copies of code that LLVM optimises apart.  TVM writes
``c + a * b`` as ``llvm.fmuladd``, one instruction everywhere.  A product that waits in a buffer, or is subtracted, is
left to LLVM, which makes one instruction of it and its sum or two, by what stands around them.  So products are added,
in the expression that they are made in; tests/codegen/kernels/test_rows.py looks for others in LLVM's code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm.script import tirx as T

VECTOR = 16
"""Elements of the vectors that kernels are written in; LLVM splits them where registers are narrower."""

_INFINITE, _NAN = 0x7F800000, 0x7FC00000


def registers(count: int, shape: tuple[int, ...], dtype: str = "float32") -> list[Any]:
    """Buffers that LLVM keeps in registers, where there are enough.

    TVM puts a buffer of constant size on the stack where it has less than 1 KB, and allots others by calls; a buffer
    of a kernel that sums should therefore be several small ones.  A scope ("local") would make it allot all of them.
    """
    return [T.alloc_buffer(shape, dtype) for _ in range(count)]


def ramp(first: Any, lanes: int) -> Any:
    """Return the index of ``lanes`` neighbouring elements; for one lane, the element's own."""
    return T.ramp(first, 1, lanes) if lanes > 1 else first


def widen(value: Any, lanes: int) -> Any:
    """Put a scalar into every lane."""
    return T.broadcast(value, lanes) if lanes > 1 else value


def splat_float(value: float, lanes: int) -> Any:
    """Return a vector of a float32 constant in every lane."""
    return widen(T.float32(value), lanes)


def splat(value: Any, lanes: int) -> Any:
    """Return a vector of ``lanes`` equal int32 constants."""
    value &= 0xFFFFFFFF
    return widen(T.int32(value - (1 << 32) if value >> 31 else value), lanes)


def product(a: Any, b: Any, lanes: int) -> Any:
    """Multiply vectors whose product waits for a sum that is made elsewhere.

    It is added to zero at once, which TVM would leave out: LLVM cannot join the product and that sum afterwards.
    """
    number = T.llvm_lookup_intrinsic_id("llvm.fmuladd")
    return T.call_llvm_pure_intrin(
        number, a, b, splat_float(0, lanes), dtype=f"float32x{lanes}" if lanes > 1 else "float32"
    )


def exp(x: Any, lanes: int) -> Any:
    """``e ** x`` to 2 units in the last place; 0 below -87, infinity where float32 ends, NaN of NaN.

    Range reduction by ln 2 in two parts and a degree-6 polynomial (the Cephes ``expf`` scheme): the
    scalar call to libm that LLVM emits instead costs about ten times as much.
    """

    const = partial(splat_float, lanes=lanes)
    x = clamp(x, -87.5, 89.0, lanes)  # n is -126 to 128
    n = T.floor(x * const(1.44269504088896341) + const(0.5))
    r = x + n * const(-0.693359375) + n * const(2.12194440e-4)
    p = const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + const(c)
    p = p * r * r + r + const(1.0)
    suffix = f"x{lanes}" if lanes > 1 else ""
    bias = splat(126, lanes) if lanes > 1 else T.int32(126)
    shift = splat(23, lanes) if lanes > 1 else T.int32(23)
    half = T.shift_left(T.Cast(f"int32{suffix}", n) + bias, shift)  # 2 ** (n - 1): 2 ** 128 is not a float32
    return (p + p) * T.reinterpret(half, dtype=f"float32{suffix}")


def clamp(x: Any, low: float, high: float, lanes: int) -> Any:
    """Bound x, and leave NaN as it is."""
    return at_most(at_least(x, low, lanes), high, lanes)


def at_least(x: Any, low: float, lanes: int) -> Any:
    """Return the larger of x and a constant, and NaN of NaN.

    ``max(a, b)`` is ``a > b ? a : b``, in TVM as in x86's and WebAssembly's instructions: b where one of them is NaN.
    """
    return T.max(splat_float(low, lanes), x)


def at_most(x: Any, high: float, lanes: int) -> Any:
    """As :func:`at_least`, the smaller of both."""
    return T.min(splat_float(high, lanes), x)


def larger(one: Any, other: Any, lanes: int) -> Any:
    """Return the larger of two vectors, and NaN where either is NaN."""
    infinite = T.int32(_INFINITE) if lanes == 1 else splat(_INFINITE, lanes)
    return T.Select(size_bits(one, lanes) > infinite, one, T.max(one, other))


def size_bits(x: Any, lanes: int) -> Any:
    """Return ``|x|`` as the int32 of its bits, which are larger for the larger size; infinity and NaN above all."""
    whole, mask = ("int32", T.int32(0x7FFFFFFF)) if lanes == 1 else (f"int32x{lanes}", splat(0x7FFFFFFF, lanes))
    return T.bitwise_and(T.reinterpret(x, dtype=whole), mask)


def is_nan(x: Any) -> Any:
    """Tell whether one float32 is NaN, by its bits: TVM holds ``x != x`` for false."""
    return size_bits(x, 1) > T.int32(_INFINITE)


def finite_size(bits: Any) -> Any:
    """Return the float32 that :func:`size_bits` took apart; NaN of infinity as well."""
    is_finite = bits < T.int32(_INFINITE)
    return T.reinterpret(T.Select(is_finite, bits, T.int32(_NAN)), dtype="float32")


def erf(x: Any, lanes: int) -> Any:
    """Compute the error function to 4e-7: a quotient of polynomials in x ** 2, times x.

    Fitted by least squares on [0, 3.9], weighted again and again by the relative error (Sanathanan and Koerner 1963);
    beyond, float32 rounds it to 1.  The call to libm for each element costs about twenty times as much.
    """

    const = partial(splat_float, lanes=lanes)

    def polynomial(coefficients: Sequence[float]) -> Any:
        value = const(coefficients[-1])
        for c in coefficients[-2::-1]:
            value = value * square + const(c)
        return value

    x = clamp(x, -3.9, 3.9, lanes)
    square = x * x
    over = polynomial((1.12837915, 0.189669334, 0.0526683479, 0.00373843573, 0.000285061055, 2.06641186e-06))
    under = polynomial((1.0, 0.501422852, 0.113819935, 0.0149144588, 0.00115739206, 3.8269327e-05))
    return clamp(x * over / under, -1.0, 1.0, lanes)


def emit_tree_sum(buffer: Any, lanes: int, *prefix: Any) -> None:
    """Emit stores that leave the sum of ``buffer[*prefix, 0:lanes]`` in element 0 (LLVM makes shuffles of them)."""
    emit_tree(operator.add, buffer, lanes, *prefix)


def emit_tree(combine: Callable[[Any, Any], Any], buffer: Any, lanes: int, *prefix: Any) -> None:
    """As :func:`emit_tree_sum`, for any operation that may take its operands in any order."""
    while lanes > 1:
        lanes //= 2
        for i in range(lanes):
            T.buffer_store(buffer, combine(buffer[(*prefix, i)], buffer[(*prefix, lanes + i)]), [*prefix, i])
