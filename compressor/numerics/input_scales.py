"""Choose calibrated scales of activations, and measure the error of rounding with them."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.activations import Activations
from compressor.formats.rounded_activations import _LARGEST_E4M3, SMALLEST, round_activations
from compressor.numerics.products.deterministic import even, few_bits, total
from compressor.numerics.range_search import OUTPUT_RATIOS

_STEPS = 24  # of a quarter of a power of two: a range of 64


def search_input_scale(rows: Tensor, absmax: float, activations: Activations, weight: Tensor | None = None) -> Tensor:
    """Return the stored scale with the least squared error on some rows, never worse there than the largest size's.

    One token that is much larger than the others would cost them all their bits: the range is cut in steps of a quarter
    of a power of two, as far as the error falls.

    Args:
        rows: float32 [n, in].
        absmax: the largest size over all tokens.
        weight: float32 [out, in], the linear whose outputs' error counts; None counts that of the rows.  Ranges around
            the largest size are then tried as well (:data:`compressor.numerics.range_search.OUTPUT_RATIOS`).
    Returns:
        float32 [1]; 1 where everything is zero.
    Raises:
        CompressorError: the inputs hold NaN or inf.
    """
    tried = range_cuts(absmax, activations, _STEPS)
    if weight is None:
        return min(tried, key=lambda scale: input_error(rows, activations, scale))
    if len(tried) > 1:
        tried += [few_bits(tried[0] * ratio) for ratio in OUTPUT_RATIOS[1:]]
    gram = even(weight.t()) @ even(weight.t()).t()
    return min(tried, key=lambda scale: _output_error(rows, activations, scale, gram))


def range_cuts(absmax: float, activations: Activations, steps: int) -> list[Tensor]:
    """Scales to try, float32 [1] each: that of the largest size, and so many in all, a quarter of a power of two apart.

    NVFP4's block scales follow each block, so its range is kept.

    Raises:
        CompressorError: the largest size is NaN or inf.
    """
    if not 0 <= absmax < float("inf"):
        raise CompressorError("its inputs hold NaN or inf on the calibration samples; check the model and the samples")
    blocks = _LARGEST_E4M3 if activations.scale_type == "E4M3" else 1.0
    widest = torch.tensor([absmax / (activations.max_value * blocks)], dtype=torch.float64)
    if float(widest) <= SMALLEST:
        return [torch.ones(1)]
    return [few_bits(widest * 2.0 ** (-step / 4)).float() for step in range(1 if blocks > 1 else steps)]


def input_error(rows: Tensor, activations: Activations, scale: Tensor) -> float:
    """Sum of squares of what rounding changes, in float64."""
    return float(total((rows - round_activations(rows, activations, scale)).double().square()))


def _output_error(rows: Tensor, activations: Activations, scale: Tensor, gram: Tensor) -> float:
    """As :func:`input_error`, of the outputs; ``gram`` is W^T W, with zeros up to a multiple of 16."""
    changed = even(rows - round_activations(rows, activations, scale))
    return float(total(((changed @ gram) * changed).double()))
