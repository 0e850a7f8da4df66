"""Choose a scale of input channels by the error of the outputs after rounding (SmoothQuant, AWQ)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.formats.rounded_activations import round_activations
from compressor.numerics.input_scales import search_input_scale
from compressor.numerics.nearest import _ERROR_BYTES, rtn_quantize
from compressor.numerics.products.deterministic import total
from compressor.numerics.range_search import Work, grid_work

Quantize: TypeAlias = Callable[[Tensor, Tensor, Format], PackedWeight]
"""(weight float32 [out, in], scaled; the scale float32 [in]; format) -> what it is rounded to."""


def _nearest(weight: Tensor, _scale: Tensor, fmt: Format) -> PackedWeight:
    return rtn_quantize(weight, fmt)


def output_error(
    x: Tensor, weights: Sequence[Tensor], scale: Tensor, fmt: Format, quantize: Quantize = _nearest
) -> float:
    """||X W^T - Q(X / s) Q(W s)^T||^2 over all weights, with activations as the format takes them.

    Args:
        x: rows, float32 [n, in].
        scale: float32 [in].
    """
    smoothed, lost = x / scale, 0.0
    if fmt.activations is not None:
        stored = fmt.has_input_scale
        step = search_input_scale(smoothed, float(smoothed.abs().max()), fmt.activations) if stored else None
        smoothed = round_activations(smoothed, fmt.activations, step)
    for weight in weights:
        difference = x @ weight.t() - smoothed @ dequantize(quantize(weight * scale, scale, fmt)).t()
        lost += float(total(difference.double().square()))
    return lost


def search_scale(
    x: Tensor,
    weights: Sequence[Tensor],
    fmt: Format,
    strengths: Sequence[float],
    scale_of: Callable[[float], Tensor],
    share: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the scale, float64 [in], of the strength with the least :func:`output_error` once channels share it.

    Args:
        x, weights, fmt: as for :func:`output_error`.
        scale_of: strength -> scale float64 [in].
        share: scale -> the same, with one value for all channels that must have one.
    """
    return scale_of(min(strengths, key=lambda s: output_error(x, weights, share(scale_of(s)).float(), fmt)))


KEPT_ROWS = 512  # that calibration.Inputs keeps of 64 samples of 256 tokens


def scaled_work(rows: int, columns: int, fmt: Format, tries: int, *, chosen: bool = True) -> Work:
    """Work of trying scales of a weight's columns; and, ``chosen``, of searching the grids it is then rounded on."""
    size, rounded = rows * columns, tries + chosen
    work = Counter(grid_work(rows, columns, fmt, int(chosen)))
    work.update(grid_work(rows, columns, fmt, tries, searched=False))
    work.update({
        "rtn_element": rounded * size,
        "dequantize_element": rounded * size,
        "matmul_flop": tries * 4 * KEPT_ROWS * size,
        "stream_byte": 12 * size * tries + _ERROR_BYTES * size * chosen,
    })  # fmt: skip
    return work


def scaled_working_bytes(rows: int, columns: int, _fmt: Format) -> int:
    """Memory of one such try: the weight four times in float32, and its codes."""
    return 18 * rows * columns
