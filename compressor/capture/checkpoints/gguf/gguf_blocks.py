"""Dequantise the blocks of GGUF tensors, and pack some (llama.cpp, ``ggml/src/ggml-quants.c: dequantize_row_*``).

A row is a sequence of blocks of B bytes for E elements; integers and scales (``d``, ``m``: float16) are little endian.

    type  E    B    bytes of a block, in order                           value
    Q4_0  32   18   d, 16 bytes of nibbles                               d * (q - 8)
    Q4_1  32   20   d, m, 16 bytes of nibbles                            d * q + m
    Q5_0  32   22   d, 32 high bits, 16 bytes of nibbles                 d * (q - 16)
    Q5_1  32   24   d, m, 32 high bits, 16 bytes of nibbles              d * q + m
    Q8_0  32   34   d, 32 int8                                           d * q
    Q2_K  256  84   16 bytes of 4-bit scale and minimum, 64 bytes, d, m  d * scale * q - m * minimum
    Q3_K  256  110  256 high bits, 64 bytes, 12 bytes of scales, d       d * (scale - 32) * (q - 4)
    Q4_K  256  144  d, m, 12 bytes of scales and minima, 128 bytes       d * scale * q - m * minimum
    Q5_K  256  176  d, m, 12 bytes, 256 high bits, 128 bytes             d * scale * q - m * minimum
    Q6_K  256  210  128 bytes, 64 bytes of high bits, 16 int8 scales, d  d * scale * (q - 32)
    TQ2_0 256  66   64 bytes of 2-bit codes, d                           d * (q - 1)
    Q2_0  64   18   d, 16 bytes of 2-bit codes                           d * (q - 1)
    MXFP4 32   17   exponent e (E8M0), 16 bytes of nibbles (E2M1)        2^(e - 127) * FP4

A byte of nibbles holds element j and element j + 16 (Q*_0, Q*_1, MXFP4), or j and j + 32 of 64 (Q4_K, Q5_K).  A byte
of 2-bit codes holds four neighbours (Q2_0), or elements j, j + 32, j + 64 and j + 96 of 128 (TQ2_0).

All products are exact in float32 (at most 24 bits); where a minimum is added, the sum is rounded once.  This is
ggml's own arithmetic, so values are equal to its, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import fp4_values


@dataclass(frozen=True)
class BlockType:
    """A type of blocks: how many elements and bytes each has, and its values: uint8 [N, B] -> float32 [N, E]."""

    elements: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor]


def _floats(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 numbers at a byte of each block: float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(fields: Tensor, width: int, count: int) -> Tensor:
    """Return ``count`` fields of ``width`` bits of each byte, the lowest first: [N, ..., L] -> [N, ..., count, L]."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8)[:, None]
    found: Tensor = (fields[..., None, :] >> shifts) & (2**width - 1)
    return found


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """Return the 4-bit codes of 32 elements in two halves: uint8 [N, 32]."""
    return _bits(blocks[:, at : at + 16], 4, 2).flatten(1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the fifth bits of 32 elements, bit j of a 32-bit word for element j, times 16: uint8 [N, 32]."""
    return _bits(blocks[:, at : at + 4, None], 1, 8).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * (_nibbles(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * _nibbles(blocks, 4).float() + _floats(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * ((_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)).float() + _floats(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    fields = blocks[:, :16, None]  # one for 16 elements
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16).float()
    scales = _floats(blocks, 80)[..., None] * (fields & 15).float()
    minima = _floats(blocks, 82)[..., None] * (fields >> 4).float()
    return (scales * codes - minima).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32)
    high = _bits(blocks[:, :32], 1, 8)  # [N, 8, 32]
    codes = (low | (high << 2)).reshape(-1, 16, 16).float() - 4
    # Sixteen 6-bit scales: low nibbles in the first 8 bytes, pairs of high bits in the last 4.
    low_bits, high_bits = _bits(blocks[:, 96:104], 4, 2), _bits(blocks[:, 104:108], 2, 4)
    scales = (low_bits.flatten(1) | (high_bits.flatten(1) << 4)).float() - 32
    return (_floats(blocks, 108)[..., None] * scales[..., None] * codes).flatten(1)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight 6-bit scales and minima of Q4_K and Q5_K: uint8 [N, 12] -> two of float32 [N, 8, 1]."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (last & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (last >> 4) | ((second >> 6) << 4)), 1)
    return scales.float()[..., None], minima.float()[..., None]


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Scale the codes [N, 8, 32] of Q4_K and Q5_K, whose d, m and scales are the first 16 bytes of a block."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scaled = _floats(blocks, 0)[..., None] * scales * codes.float()
    return (scaled - _floats(blocks, 2)[..., None] * minima).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _bits(blocks[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _with_minima(blocks, low | (_bits(blocks[:, 16:48], 1, 8) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 8, 32)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32)
    codes = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()[..., None]
    return (_floats(blocks, 208)[..., None] * scales * codes).flatten(1)


def _tq2_0(blocks: Tensor) -> Tensor:
    codes = _bits(blocks[:, :64].reshape(-1, 2, 32), 2, 4).flatten(1)
    return _floats(blocks, 64) * (codes.float() - 1)


def _q2_0(blocks: Tensor) -> Tensor:
    return _floats(blocks, 0) * (_bits(blocks[:, 2:, None], 2, 4).flatten(1).float() - 1)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].to(torch.int32) - 127  # 255 is not special in ggml
    return torch.ldexp(fp4_values(_nibbles(blocks, 1)).double(), exponents).float()


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "TQ2_0": BlockType(256, 66, _tq2_0),
    "Q2_0": BlockType(64, 18, _q2_0),
    "MXFP4": BlockType(32, 17, _mxfp4),
}


BLOCK = 32
"""Weights that share a scale in the types that :func:`pack_blocks` knows."""
SIGNED_RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""Whole numbers that are multiplied by a block's scale, the fewest bytes first."""


def pack_two_bits(kind: str, numbers: Tensor, scales: Tensor) -> Tensor:
    """Pack rows of whole numbers, -1 to 2, into ``Q2_0``, or -1 to 1 into ``TQ2_0``.

    Args:
        numbers: int16 [out, in].
        scales: float16 [out, in / elements of a block].
    Returns:
        uint8 [out, bytes of a row].
    """
    rows, codes = len(numbers), (numbers + 1).to(torch.uint8)
    parts = [scales.contiguous().view(torch.uint8).view(rows, -1, 2)]
    if kind == "TQ2_0":
        fields = codes.view(rows, -1, 2, 4, 32).movedim(3, 0)
        parts.insert(0, (fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6).flatten(2))
    else:
        fields = codes.view(rows, -1, 16, 4).movedim(3, 0)
        parts.append(fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6)
    return torch.cat(parts, -1).view(rows, -1)


def pack_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """Pack rows of FP4 codes (E2M1), uint8 [out, in], with E8M0 exponents, uint8 [out, in / 32], into ``MXFP4``."""
    rows, halves = len(codes), codes.view(len(codes), -1, 2, BLOCK // 2)
    return torch.cat((exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4), -1).view(rows, -1)


def pack_blocks(kind: str, numbers: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Pack rows of whole numbers into blocks of ``Q4_0``, ``Q4_1``, ``Q5_0`` or ``Q8_0``: dequantisation's inverse.

    Args:
        numbers: int16 [out, in], in the type's range (:data:`SIGNED_RANGES`); of ``Q4_1`` 0 to 15.
        scales: float16 [out, in / 32].
        minima: of ``Q4_1``, alike.
    Returns:
        uint8 [out, bytes of a row].
    """
    rows = len(numbers)
    low = 0 if kind in ("Q4_1", "Q8_0") else SIGNED_RANGES[kind][0]
    codes = (numbers - low).to(torch.int8 if kind == "Q8_0" else torch.uint8).view(torch.uint8).view(rows, -1, BLOCK)
    parts = [scales.contiguous().view(torch.uint8).view(rows, -1, 2)]
    if minima is not None:
        parts.append(minima.contiguous().view(torch.uint8).view(rows, -1, 2))
    if kind == "Q8_0":
        parts.append(codes)
    else:
        if kind == "Q5_0":  # bit j of a 32-bit word is the fifth of element j
            eights = (codes >> 4).view(rows, -1, BLOCK // 8, 8)
            parts.append((eights << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8))
        parts.append((codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4))
    return torch.cat(parts, -1).view(rows, -1)
