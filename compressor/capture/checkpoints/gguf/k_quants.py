"""Fit weights to K-quants, whose scales are codes themselves: no grid of ours lies on theirs.

A block of 256 weights has float16 factors, and each of its parts a whole number for a scale (layouts:
:mod:`.gguf_blocks`):

    Q4_K   8 parts of 32   d * scale * q - m * minimum    q 0 to 15, scale and minimum 0 to 63
    Q6_K  16 parts of 16   d * scale * (q - 32)           q 0 to 63, scale -128 to 127

For each part several ranges are tried; codes are rounded, and the line through them is fitted by least squares.  The
best scales are rounded to whole numbers, and the codes once more on those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import UsageError

K_QUANTS = ("Q4_K", "Q6_K")
_BLOCK = 256
_RANGES = [1.0, *(1 + 0.02 * step for step in range(-10, 6) if step)]
_CHUNK_BLOCKS = 1 << 12


def fit_k_quant(kind: str, weight: Tensor) -> Tensor:
    """Round a weight to blocks of one of :data:`K_QUANTS`.

    Args:
        weight: float32 [out, in].
    Returns:
        uint8 [out, bytes of a row].
    Raises:
        UsageError: rows do not divide into blocks.
    """
    if weight.shape[1] % _BLOCK:
        raise UsageError(f"{kind} has blocks of {_BLOCK} weights, and rows of {weight.shape[1]} are not a multiple")
    fit = _q4_k if kind == "Q4_K" else _q6_k
    given = weight.reshape(-1, _BLOCK)
    blocks = torch.cat([fit(given[begin : begin + _CHUNK_BLOCKS]) for begin in range(0, len(given), _CHUNK_BLOCKS)])
    return blocks.view(len(weight), -1)


def _q4_k(weight: Tensor) -> Tensor:
    """Fit blocks, float32 [N, 256] -> uint8 [N, 144]."""
    parts = weight.view(-1, 8, 32)
    scales, minima = _lines(parts)
    d, scale = _rounded(scales, 63)
    m, minimum = _rounded(minima, 63)
    step, offset = d * scale, m * minimum
    codes = ((parts + offset[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, 15)
    codes = torch.where(step[..., None] > 0, codes, 0).to(torch.uint8)
    s, n = scale.to(torch.uint8), minimum.to(torch.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, n[:, :4] | n[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (n[:, 4:] & 15) << 4]
    halves = codes.view(-1, 4, 2, 32)
    return torch.cat((_half(d), _half(m), *packed, (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)), 1)


def _q6_k(weight: Tensor) -> Tensor:
    """Fit blocks, float32 [N, 256] -> uint8 [N, 210]."""
    parts = weight.view(-1, 16, 16)
    d, scale = _rounded(_steps(parts), 127)
    step = (d * scale)[..., None]
    codes = torch.where(step != 0, (parts / torch.where(step != 0, step, 1.0)).round().clamp(-32, 31), 0) + 32
    codes = codes.to(torch.uint8)
    low, high = (codes & 15).view(-1, 2, 2, 64), (codes >> 4).view(-1, 2, 4, 32).movedim(2, 0)
    return torch.cat(
        (
            (low[:, :, 0] | low[:, :, 1] << 4).flatten(1),
            (high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6).flatten(1),
            scale.to(torch.int8).view(torch.uint8),
            _half(d),
        ),
        1,
    )


def _lines(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima, both at least 0, of codes 0 to 15: float32 [N, 8] each."""
    lowest = parts.amin(-1).clamp(max=0)
    width = (parts.amax(-1) - lowest).clamp(min=1e-30)
    scales, minima, least = width / 15, -lowest, torch.full_like(width, torch.inf)
    for ratio in _RANGES:
        codes = ((parts - lowest[..., None]) * (15 / (ratio * width))[..., None]).round().clamp(0, 15)
        q, x = codes - codes.mean(-1, keepdim=True), parts - parts.mean(-1, keepdim=True)
        slope = (q * x).sum(-1) / q.square().sum(-1).clamp(min=1e-30)
        at_zero = parts.mean(-1) - slope * codes.mean(-1)
        through_zero = (codes * parts).sum(-1) / codes.square().sum(-1).clamp(min=1e-30)
        slope, at_zero = torch.where(at_zero > 0, through_zero, slope), at_zero.clamp(max=0)
        error = (slope[..., None] * codes + at_zero[..., None] - parts).square().sum(-1)
        better = (error < least) & (slope >= 0)
        least = torch.where(better, error, least)
        scales, minima = torch.where(better, slope, scales), torch.where(better, -at_zero, minima)
    return scales, minima


def _steps(parts: Tensor) -> Tensor:
    """Return the steps of codes -32 to 31, of either sign: float32 [N, 16]."""
    place = parts.abs().argmax(-1, keepdim=True)
    first = -parts.gather(-1, place)[..., 0] / 32  # the largest weight gets the code that one sign alone has
    steps, least = first, torch.full_like(first, torch.inf)
    for ratio in _RANGES:
        step = first * ratio
        codes = torch.where(step[..., None] != 0, (parts / torch.where(step != 0, step, 1.0)[..., None]).round(), 0)
        codes = codes.clamp(-32, 31)
        fitted = (codes * parts).sum(-1) / codes.square().sum(-1).clamp(min=1e-30)
        error = (fitted[..., None] * codes - parts).square().sum(-1)
        better = error < least
        steps, least = torch.where(better, fitted, steps), torch.where(better, error, least)
    return steps


def _rounded(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the factor of each block, float16 as float32 [N, 1], and whole numbers: values are about their product."""
    factor = (values.abs().amax(-1, keepdim=True) / most).half().float()
    numbers = torch.where(factor > 0, values / torch.where(factor > 0, factor, 1.0), 0).round().clamp(-most, most)
    return factor, numbers


def _half(factors: Tensor) -> Tensor:
    """Return the bytes of float16 factors [N, 1]: uint8 [N, 2]."""
    return factors.half().view(torch.uint8)
