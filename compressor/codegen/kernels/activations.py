"""Expressions that round activations, as :func:`compressor.formats.rounded_activations.round_activations` defines it.

Every function takes and returns TIR expressions over ``lanes`` float32; the same operations in the same order as there,
so that no value falls on the other side of a tie.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.vector import clamp, is_nan, splat, splat_float, widen
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.formats.rounded_activations import SMALLEST

_EXPONENT = 0x7F800000  # float32's field


def span_scale(top: Any, act: Activations, input_scale: Any) -> Any:
    """Return the scale of a span of columns; NaN where ``top`` is.

    Args:
        top: the largest size of its columns, or their mean size; NaN if one of them is not finite.
        input_scale: where one is stored.
    """
    return T.if_then_else(is_nan(top), top, _scale(top, act, input_scale))


def _scale(top: Any, act: Activations, input_scale: Any) -> Any:
    if act.scale_type == "E8M0":
        assert act.element is not None
        return _binade(top, 1) * T.float32(2.0**-act.element.largest_exponent)
    if act.scale_type == "E4M3":
        blocks = T.min(top / (input_scale * T.float32(act.max_value)), T.float32(448))
        return _to_element(blocks, Element("E4M3", 4, 3), 1) * input_scale
    return input_scale if act.granularity == "tensor" else top / T.float32(act.max_value)


def inverse_scale(scale: Any) -> Any:
    """Return the factor that activations are multiplied by."""
    return T.if_then_else(scale > T.float32(SMALLEST), T.float32(1) / scale, T.float32(0))


def on_grid(x: Any, inverse: Any, act: Activations, lanes: int) -> Any:
    """Activations times the inverse of their scale, rounded and saturated."""
    if act.is_sign:
        size = widen(T.if_then_else(inverse > T.float32(0), T.float32(1), T.float32(0)), lanes)
        return T.Select(x < splat_float(0.0, lanes), splat_float(0.0, lanes) - size, size)
    scaled = clamp(x * widen(inverse, lanes), -act.max_value, act.max_value, lanes)
    return T.nearbyint(scaled) if act.element is None else _to_element(scaled, act.element, lanes)


def _to_element(value: Any, element: Element, lanes: int) -> Any:
    """Round to the nearest value of a float: an even number of its binade's steps where two are as near."""
    binade = T.max(_binade(value, lanes), splat_float(2.0 ** (1 - element.bias), lanes))
    step = binade * splat_float(2.0**-element.mantissa_bits, lanes)
    return T.nearbyint(value / step) * step


def _binade(value: Any, lanes: int) -> Any:
    """Return the power of two at or below a size; zero below the smallest normal number."""
    field = splat(_EXPONENT, lanes) if lanes > 1 else T.int32(_EXPONENT)
    bits = T.bitwise_and(T.reinterpret(value, dtype=_typed("int32", lanes)), field)
    return T.reinterpret(bits, dtype=_typed("float32", lanes))


def _typed(kind: str, lanes: int) -> str:
    return f"{kind}x{lanes}" if lanes > 1 else kind
