"""Round activations as a packed linear does: the definition that kernels are held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.errors import CompressorError
from compressor.formats.activations import Activations
from compressor.formats.elements import Element

SMALLEST = 2.0**-100
"""Below it a scale counts as zero, and so do the activations: its inverse would come near float32's largest number."""


_LARGEST_E4M3 = 448.0


def round_activations(x: Tensor, activations: Activations | None, input_scale: Tensor | None = None) -> Tensor:
    """Round the input of a packed linear to the numbers that it computes on.

    Each is ``round(x / scale) * scale``.  The scale of a token or group is its largest size over the largest number; of
    1 bit, which are signs (zero's is positive), its mean size; of E8M0, the power of two that brings the largest
    exponent to the largest exponent (OCP Microscaling 1.0, section 6.3); of E4M3, the nearest to the largest size over
    the largest number and the tensor's scale, times the latter.  A token or group with NaN or infinity is NaN as a
    whole; with a stored scale infinity becomes the largest number, and NaN stays.

    Args:
        x: float32, or float64 to check others by; [..., in].
        activations: None returns x.
        input_scale: float32 [1], of those that are calibrated.
    """
    if activations is None:
        return x
    columns = x.shape[-1]
    size = activations.group_size or columns
    groups = pad(x, (0, -columns % size)).reshape(*x.shape[:-1], -(-columns // size), size)
    sizes = _sizes(groups, columns, activations)
    scale = _scale(sizes, activations, input_scale)
    if activations.granularity != "tensor":  # a stored scale has a place for infinity, and one that follows it has not
        scale = torch.where(torch.isfinite(sizes), scale, torch.nan)
    inverse = torch.where(scale > SMALLEST, 1.0 / scale, 0.0)
    scaled = (groups * inverse).clamp(-activations.max_value, activations.max_value)
    if activations.is_sign:
        rounded = torch.where(inverse > 0, torch.where(scaled < 0, -1.0, 1.0), 0.0).to(x.dtype)
    else:
        rounded = torch.round(scaled) if activations.element is None else round_to_element(scaled, activations.element)
    return (rounded * scale).flatten(-2)[..., :columns]


def _sizes(groups: Tensor, columns: int, activations: Activations) -> Tensor:
    """Return the size that a scale follows, [..., groups, 1]: the largest of a group, or the mean.

    Zeros fill the last group up."""
    sizes = groups.abs()
    if not activations.is_sign:
        return sizes.amax(-1, keepdim=True)
    counts = groups.new_full((groups.shape[-2], 1), groups.shape[-1])
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
        blocks = (top / (input_scale.to(top.dtype) * activations.max_value)).clamp(max=_LARGEST_E4M3)
        return round_to_element(blocks, Element("E4M3", 4, 3)) * input_scale
    if activations.granularity == "tensor" and input_scale is not None:
        return input_scale.to(top.dtype).expand_as(top)
    return top / activations.max_value


def round_to_element(values: Tensor, element: Element) -> Tensor:
    """Round to the nearest values of a float with a mantissa, ties to even: within a binade they are even steps apart.

    Args:
        values: float32 or float64, no larger than the element's largest.
    """
    exponent = (torch.frexp(values)[1] - 1).clamp(min=1 - element.bias)
    step = torch.ldexp(torch.ones_like(values), exponent - element.mantissa_bits)
    return torch.round(values / step) * step


def without_small(x: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return activations, float [..., in], with zeros for those below their thresholds [in]; NaN is below none."""
    return x if thresholds is None else torch.where(x.abs() < thresholds, torch.zeros_like(x), x)
