"""Functions of float32 as arithmetic, where WGSL promises too little accuracy or range.

WGSL's sine and cosine may be wrong by 2^-11 and are specified only between -pi and pi, but rotary embeddings need
angles of thousands.  Its power is not defined for negative numbers, and its tanh may overflow internally.
"""

from __future__ import annotations

from math import log
from typing import Any

from tvm import tirx

from compressor.codegen.kernels.vector import erf

_TWO_OVER_PI = 0.6366197723675814
_HALF_PI = (1.5703125, 4.837512969970703e-4, 7.549789954891882e-8)
"""Pi / 2 in three parts, the first two of so few bits that their products with integers up to 2^15 are exact: Cody and
Waite 1980, Software Manual for the Elementary Functions, chapter 8.
"""
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
"""Minimax polynomials between -pi / 4 and pi / 4: Moshier, Cephes mathematical library, sinf."""
_LOGARITHM = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def _number(value: float) -> Any:
    return tirx.const(value, "float32")


def sine(x: Any, ahead: int) -> Any:
    """Return the sine of x + ``ahead`` * pi / 2, for abs(x) up to 2^15."""
    turns = tirx.floor(x * _number(_TWO_OVER_PI) + _number(0.5))
    rest = x
    for part in _HALF_PI:
        rest = rest - turns * _number(part)
    square = rest * rest
    sine = rest + rest * square * _polynomial(_SINE, square)
    cosine = _number(1.0) - _number(0.5) * square + square * square * _polynomial(_COSINE, square)
    quadrant = tirx.bitwise_and(tirx.Cast("int32", turns) + tirx.const(ahead, "int32"), tirx.const(3, "int32"))
    size = tirx.Select(tirx.bitwise_and(quadrant, tirx.const(1, "int32")) == 1, cosine, sine)
    return tirx.Select(quadrant >= 2, -size, size)


def logarithm(x: Any) -> Any:
    """Return the natural logarithm, infinite or NaN where PyTorch's is.

    Of the mantissa, between sqrt(1 / 2) and sqrt(2), by a polynomial (Moshier, Cephes mathematical library, logf).
    """
    least = 2.0**-126
    whole = tirx.Select(x < _number(least), x * _number(2.0**23), x)  # subnormals become normal
    bits = tirx.reinterpret("int32", whole)
    mantissa = tirx.reinterpret(
        "float32", tirx.bitwise_or(tirx.bitwise_and(bits, _whole(0x7FFFFF)), _whole(0x3F000000))
    )
    power = tirx.Cast("float32", tirx.bitwise_and(tirx.shift_right(bits, _whole(23)), _whole(255)) - _whole(126))
    power = power - tirx.Select(x < _number(least), _number(23.0), _number(0.0))
    is_low = mantissa < _number(0.7071067811865476)
    power = power - tirx.Select(is_low, _number(1.0), _number(0.0))
    m = tirx.Select(is_low, mantissa + mantissa, mantissa) - _number(1.0)
    rest = _polynomial(_LOGARITHM, m) * m * m * m - _number(2.12194440e-4) * power - _number(0.5) * m * m
    value = m + rest + _number(0.693359375) * power
    value = tirx.Select(x < _number(3.4028234663852886e38), value, x + x)  # infinity and NaN stay
    edge = tirx.Select(x == _number(0.0), _number(-float("inf")), _number(float("nan")))
    return tirx.Select(x > _number(0.0), value, tirx.Select(x != x, x, edge))


def _whole(value: int) -> Any:
    return tirx.const(value, "int32")


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    value = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _number(coefficient)
    return value


def _tanh(op: Any) -> Any:
    """Compute tanh from a clamped exponential: devices may use exponentials that overflow."""
    x = tirx.max(tirx.min(op.args[0], _number(15.0)), _number(-15.0))
    return _number(1.0) - _number(2.0) / (tirx.exp(x + x) + _number(1.0))


def _sigmoid(op: Any) -> Any:
    """Compute the sigmoid from a clamped exponential: devices may use one that overflows."""
    x, lowest = op.args[0], _number(-88.0)
    value = _number(1.0) / (_number(1.0) + tirx.exp(-tirx.max(x, lowest)))
    return tirx.Select(x < lowest, _number(0.0), value)  # so that minus infinity times it is NaN


def power(op: Any) -> Any:
    """Expand powers with exponents 1 to 8 to products, as WGSL's pow is not defined for negative numbers; those of a
    positive number, such as the bases of rotary embeddings, are exponentials.
    """
    x, exponent = op.args
    if isinstance(x, tirx.FloatImm) and x.value > 0:
        return tirx.exp(exponent * _number(log(x.value)))
    if not isinstance(exponent, tirx.FloatImm) or exponent.value not in range(1, 9):
        return None
    product = x
    for _ in range(int(exponent.value) - 1):
        product = product * x
    return product


tirx.op.register_intrin_lowering("tirx.sin", target="webgpu", f=lambda op: sine(op.args[0], 0), level=99)
tirx.op.register_intrin_lowering("tirx.cos", target="webgpu", f=lambda op: sine(op.args[0], 1), level=99)
tirx.op.register_intrin_lowering("tirx.pow", target="webgpu", f=power, level=99)
tirx.op.register_intrin_lowering("tirx.tanh", target="webgpu", f=_tanh, level=99)
tirx.op.register_intrin_lowering("tirx.erf", target="webgpu", f=lambda op: erf(op.args[0], 1), level=99)
tirx.op.register_intrin_lowering("tirx.sigmoid", target="webgpu", f=_sigmoid, level=99)
