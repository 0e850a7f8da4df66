"""Rounding, packing and dequantising rows of key-value caches, in the layout of :mod:`compressor.formats.cache`.

All functions work on the last dimension and take any others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.cache import CacheFormat

_LARGEST_SCALE = 65504.0
_EXPONENT_BITS = 23  # of float32: where its exponent begins
_INFINITE = 255  # the exponent of float32's inf and NaN, and E8M0's NaN


def quantize_cache(x: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """Nearest codes, ties to even, saturating, on scales chosen from each group's largest channel.

    A float16 scale is that channel by the largest code, rounded to nearest, at most 65504; one that rounds to 0 makes
    its group 0.  A shared exponent is that channel's, less ``bits - 2``: mantissas that round beyond the largest
    saturate.  A group that holds NaN or inf gets NaN as its scale, so that all of it reads as NaN or inf.

    Args:
        x: float [..., D]; of float64 its float32 values are taken.
    Returns:
        codes int8 [..., D], the bits of an E4M3 code; scales float16 or, of E8M0, uint8 [..., groups].
    """
    width, span = x.shape[-1], fmt.span(x.shape[-1])
    groups = fmt.groups(width)
    grouped = pad(x.float(), (0, groups * span - width)).view(*x.shape[:-1], groups, span)
    absmax = grouped.abs().amax(-1)
    if fmt.scale_type == "F16":
        scale = absmax / fmt.max_value
        scales = torch.where(torch.isfinite(absmax), scale.clamp(max=_LARGEST_SCALE), scale).half()
    else:
        exponent = absmax.view(torch.int32) >> _EXPONENT_BITS
        stored = torch.where(exponent == _INFINITE, _INFINITE, (exponent - (fmt.bits - 2)).clamp(min=1))
        scales = stored.to(torch.uint8)
    divisor = _scale_values(scales)
    scaled = grouped / torch.where(divisor > 0, divisor, 1.0)[..., None]
    scaled = scaled.clamp(-fmt.max_value, fmt.max_value).flatten(-2)[..., :width]
    if fmt.element is not None:
        return scaled.to(torch.float8_e4m3fn).view(torch.int8), scales
    return torch.round(scaled).to(torch.int8), scales


def pack_cache(codes: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """Codes int8 [..., D] and scales as :func:`quantize_cache` gives them, to rows uint8 [..., row_bytes].

    Exact: :func:`unpack_cache` returns the same.
    """
    width = codes.shape[-1]
    octets = codes.int() & 255
    if fmt.bits == 4:
        half = fmt.code_bytes(width)
        octets = (octets[..., :half] & 15) | ((pad(octets[..., half:], (0, 2 * half - width)) & 15) << 4)
    if fmt.scale_type == "F16":
        halves = scales.view(torch.int16).int()
        tail = torch.stack([halves & 255, (halves >> 8) & 255], dim=-1).flatten(-2)
    else:
        tail = scales.int()
    return torch.cat([octets, tail], dim=-1).to(torch.uint8)


def unpack_cache(rows: Tensor, fmt: CacheFormat, width: int) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack_cache`, for rows of ``width`` channels."""
    octets, tail = rows[..., : fmt.code_bytes(width)].int(), rows[..., fmt.code_bytes(width) :]
    if fmt.bits == 4:
        nibbles = torch.cat([octets & 15, octets >> 4], dim=-1)[..., :width]
        octets = (nibbles ^ 8) - 8  # two's complement of 4 bits
    codes = octets.to(torch.uint8).view(torch.int8)
    if fmt.scale_type == "E8M0":
        return codes, tail
    pairs = tail.int().view(*tail.shape[:-1], fmt.groups(width), 2)
    return codes, (pairs[..., 0] | (pairs[..., 1] << 8)).to(torch.int16).view(torch.float16)


def dequantize_cache(rows: Tensor, fmt: CacheFormat, width: int) -> Tensor:
    """Return the values of rows: uint8 [..., row_bytes] -> float32 [..., width].  This defines the format."""
    codes, scales = unpack_cache(rows, fmt, width)
    values = codes.float() if fmt.element is None else codes.view(torch.float8_e4m3fn).float()
    return values * _scale_values(scales).repeat_interleave(fmt.span(width), dim=-1)[..., :width]


def _scale_values(scales: Tensor) -> Tensor:
    """Return stored scales as float32."""
    if scales.dtype is torch.float16:
        return scales.float()
    return (scales.int() << _EXPONENT_BITS).view(torch.float32)  # 255 becomes inf, which no product makes finite
