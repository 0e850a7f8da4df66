"""Unpack codes from words and small floats from bytes, and pack them: the parts that several checkpoint layouts share.

Bytes of a word count from its least significant one (little endian, as safetensors and GGUF store integers).
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 by their three low bits (OCP Microscaling Formats 1.0, table 3); bit 3 is the sign."""
_E8M0_BIAS = 127


def unpack_words(words: Tensor, bits: int, count: int, dense: bool = True) -> Tensor:
    """Unpack unsigned codes that lie in 32-bit words, lowest bits first, along the last dimension.

    Args:
        words: int32 [..., W].
        bits: of a code, 1 to 8.
        count: of the codes that are wanted; the rest is padding.
        dense: codes follow each other without a gap and may straddle two words: W = ceil(count * bits / 32).
            Otherwise a word holds 32 // bits whole codes.
    Returns:
        uint8 [..., count].
    """
    words = words.clone(memory_format=torch.contiguous_format)  # contiguous() leaves odd strides of dimensions of 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        in_bytes: Tensor = (words.view(torch.uint8)[..., None] >> shifts) & (2**bits - 1)
        return in_bytes.flatten(-2)[..., :count]
    place = torch.arange(count)
    if dense:
        start = place * bits
        word, shift = start // 32, start % 32
    else:
        word, shift = place // (32 // bits), place % (32 // bits) * bits
    raw = words.to(torch.int64) & 0xFFFFFFFF
    after = torch.nn.functional.pad(raw[..., 1:], (0, 1))
    codes: Tensor = ((raw[..., word] >> shift) | (after[..., word] << (32 - shift))) & (2**bits - 1)
    return codes.to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes into 32-bit words without gaps: the inverse of :func:`unpack_words`.

    Args:
        codes: uint8 [..., n], below 2^bits.
        bits: of a code, 1 to 8.
    Returns:
        int32 [..., ceil(n * bits / 32)]; bits behind the last code are 0.
    """
    count, lead = codes.shape[-1], codes.shape[:-1]
    padded = torch.nn.functional.pad(codes, (0, -count % 32))
    if 8 % bits == 0:
        parts = padded.reshape(*lead, -1, 8 // bits)
        in_bytes = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            in_bytes |= parts[..., place] << (place * bits)
        words = in_bytes.contiguous().view(torch.int32)
    else:
        groups = padded.reshape(*lead, -1, 32)  # 32 codes fill as many words as a code has bits
        filled = torch.zeros(*groups.shape[:-1], bits + 1, dtype=torch.int64)
        for place in range(32):
            word, shift = divmod(place * bits, 32)
            shifted = groups[..., place].to(torch.int64) << shift
            filled[..., word] |= shifted & 0xFFFFFFFF
            filled[..., word + 1] |= shifted >> 32
        unsigned = filled[..., :bits].flatten(-2)
        words = torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)
    return words[..., : word_count(count, bits)].contiguous()


def word_count(count: int, bits: int, dense: bool = True) -> int:
    """Return how many 32-bit words ``count`` codes take."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack two FP4 (E2M1) values a byte, the low nibble first: uint8 [..., n / 2] -> float32 [..., n].  Exact."""
    return fp4_values(torch.stack((packed & 15, packed >> 4), -1).flatten(-2))


def fp4_values(codes: Tensor) -> Tensor:
    """Return the FP4 (E2M1) values of 4-bit codes, in float32.  Exact."""
    values: Tensor = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
    return values[codes.to(torch.int32)]


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes a byte, the first in the low nibble: uint8 [..., n] -> uint8 [..., n / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e8m0_scales(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in float32 for uint8 exponents (OCP E8M0), exact; 255 is NaN."""
    unbiased = exponents.to(torch.int32) - _E8M0_BIAS
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), unbiased).float()
    return torch.where(exponents == 255, torch.nan, scales)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a weight [out, in], where one serves ``block`` = (rows, columns) of it."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Repeat scales [ceil(out / rows), ceil(in / columns)] for each weight of [out, in] that they serve.

    Returns:
        float32, a view where one scale serves whole rows.
    """
    spread_scales = scales.reshape(scale_shape(shape, block)).float()
    for dim, (each, size) in enumerate(zip(block, shape, strict=True)):
        if each >= size:
            spread_scales = spread_scales.expand(*(size if d == dim else -1 for d in range(2)))
        elif each > 1:
            spread_scales = spread_scales.repeat_interleave(each, dim).narrow(dim, 0, size)
    return spread_scales
