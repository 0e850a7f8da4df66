"""What rounding activations computes: the definition that kernels are held to, and the choice of calibrated scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.errors import CompressorError
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.numerics.deterministic import even, few_bits, total
from compressor.numerics.range_search import OUTPUT_RATIOS

SMALLEST = 2.0**-100
"""Below it a scale counts as zero, and so do the activations: its inverse would come near float32's largest number."""
_STEPS = 24  # of a quarter of a power of two: a range of 64
_LARGEST_E4M3 = 448.0


def round_activations(x: Tensor, activations: Activations | None, input_scale: Tensor | None = None) -> Tensor:
    """The numbers that a packed linear computes on, in place of its input.

    Each is ``round(x / scale) * scale``.  The scale of a token or group is its largest size over the largest number; of
    1 bit, which are signs (zero's is positive), its mean size; of E8M0, the power of two that brings the largest
    exponent to the largest exponent (OCP Microscaling 1.0, section 6.3); of E4M3, the nearest to the largest size over
    the largest number and the tensor's scale, times the latter.

    Args:
        x: float32, or float64 to check others by; [..., in].
        activations: None returns x.
        input_scale: float32 [1], of those that are calibrated.
    """
    if activations is None:
        return x
    columns = x.shape[-1]
    size = activations.group_size or columns
    groups = pad(x, (0, -columns % size)).reshape(*x.shape[:-1], -1, size)
    scale = _scale(_sizes(groups, columns, activations), activations, input_scale)
    inverse = torch.where(scale > SMALLEST, 1.0 / scale, 0.0)
    scaled = (groups * inverse).clamp(-activations.largest, activations.largest)
    if activations.is_sign:
        rounded = torch.where(inverse > 0, torch.where(scaled < 0, -1.0, 1.0), 0.0).to(x.dtype)
    else:
        rounded = torch.round(scaled) if activations.element is None else round_to_element(scaled, activations.element)
    return (rounded * scale).flatten(-2)[..., :columns]


def _sizes(groups: Tensor, columns: int, activations: Activations) -> Tensor:
    """What scales are made of, [..., groups, 1]: the largest size, or the mean; zeros fill the last group up."""
    sizes = groups.abs()
    if not activations.is_sign:
        return sizes.amax(-1, keepdim=True)
    counts = torch.full((groups.shape[-2], 1), groups.shape[-1], dtype=groups.dtype)
    counts[-1] = columns - (groups.shape[-2] - 1) * groups.shape[-1]
    return sizes.sum(-1, keepdim=True) / counts


def _scale(top: Tensor, activations: Activations, input_scale: Tensor | None) -> Tensor:
    """Of groups with the :func:`_sizes` ``top`` [..., groups, 1]."""
    element = activations.element
    if activations.calibrated and input_scale is None:
        raise CompressorError("activations with a calibrated scale were given none")
    if activations.scale_type == "E8M0" and element is not None:
        exponent = torch.frexp(top)[1] - 1 - element.largest_exponent
        return torch.where(top > 0, torch.ldexp(torch.ones_like(top), exponent), 0.0)
    if activations.scale_type == "E4M3" and input_scale is not None:
        blocks = (top / (input_scale.to(top.dtype) * activations.largest)).clamp(max=_LARGEST_E4M3)
        return round_to_element(blocks, Element("E4M3", 4, 3)) * input_scale
    if activations.granularity == "tensor" and input_scale is not None:
        return input_scale.to(top.dtype).expand_as(top)
    return top / activations.largest


def round_to_element(values: Tensor, element: Element) -> Tensor:
    """The nearest values of a float with a mantissa, ties to even: within a binade they are even steps apart.

    Args:
        values: float32 or float64, no larger than the element's largest.
    """
    exponent = (torch.frexp(values)[1] - 1).clamp(min=1 - element.bias)
    step = torch.ldexp(torch.ones_like(values), exponent - element.mantissa_bits)
    return torch.round(values / step) * step


def search_input_scale(rows: Tensor, absmax: float, activations: Activations, weight: Tensor | None = None) -> Tensor:
    """The stored scale with the least squared error on some rows, and never worse there than that of the largest size.

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
    widest = torch.tensor([absmax / (activations.largest * blocks)], dtype=torch.float64)
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
