"""Codes in planes of bits, in the interleaved words of tiles of 16 rows, or one after another."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.parts import STEP, TILE_ROWS
from compressor.formats.planes import TwoPlanes


def to_words(codes: Tensor, planes: Sequence[int]) -> Tensor:
    """Return uint8 [out, in] as int32 [tiles, chunks, words per chunk, 16].

    Args:
        planes: widths of the planes of bits that a code is cut into, lowest bits first.
    """
    (rows, columns), span = codes.shape, 32 // planes[-1]
    tiles, chunks = -(-rows // TILE_ROWS), -(-columns // span)
    grid = pad(codes, (0, chunks * span - columns, 0, tiles * TILE_ROWS - rows))
    quads = grid.contiguous().view(torch.int32).view(tiles, TILE_ROWS, chunks, span // 4)  # four columns each
    words, offset = [], 0
    for width in planes:
        plane = (quads >> offset) & _every_byte((1 << width) - 1)
        # A word's columns are numbered 4 * j + i: byte i, bits width * j.
        plane = plane.view(tiles, TILE_ROWS, chunks, span * width // 32, 8 // width)
        shifted = (plane[..., j] << (width * j) for j in range(8 // width))
        words.append(functools.reduce(torch.bitwise_or, shifted))  # [tiles, 16, chunks, words of this plane]
        offset += width
    return torch.cat(words, dim=-1).permute(0, 2, 3, 1).contiguous()


def from_words(stored: Tensor, planes: Sequence[int]) -> Tensor:
    """Undo :func:`to_words`: uint8 [16 * tiles, chunks * columns of a chunk]."""
    words = stored.permute(0, 3, 1, 2).contiguous()  # [tiles, 16, chunks, words]
    return quads_of(words, planes).view(torch.uint8).view(len(stored) * TILE_ROWS, -1)


def quads_of(words: Tensor, planes: Sequence[int]) -> Tensor:
    """Take words apart: int32 [..., chunks, words] -> the codes of four columns each, int32 [..., chunks, quads]."""
    quads: Tensor | None = None
    offset = first = 0
    for width in planes:
        count, mask = width // planes[-1], _every_byte((1 << width) - 1)
        plane = words[..., first : first + count]
        found = torch.stack([(plane >> (width * j)) & mask for j in range(8 // width)], dim=-1).flatten(-2)
        quads = found if quads is None else quads | found << offset
        offset, first = offset + width, first + count
    assert quads is not None
    return quads


def _every_byte(value: int) -> int:
    """Return an int32 whose four bytes are the same."""
    return int.from_bytes(bytes([value] * 4), "little", signed=True)


def split_planes(words: Tensor, fmt: Any) -> dict[str, Tensor]:
    """Return the parts that words of codes, int32 [tiles, chunks, words, 16], are stored as: one, or two planes."""
    if fmt.extra(TwoPlanes) is None:
        return {"codes": words}
    lower, upper = words.chunk(2, dim=2)
    return {"codes": upper.contiguous(), "lower": lower.contiguous()}


def whole_words(parts: Mapping[str, Tensor]) -> Tensor:
    """Undo :func:`split_planes`."""
    return torch.cat([parts["lower"], parts["codes"]], dim=2) if "lower" in parts else parts["codes"]


def to_stream(codes: Tensor, planes: Sequence[int]) -> Tensor:
    """Pack codes one after another, 64 at once, and 64 zeros behind them: uint8 [n] -> uint8 [bytes]."""
    blocks, offset, found = pad(codes, (0, -len(codes) % STEP + STEP)).view(-1, STEP), 0, []
    for width in planes:
        plane = (blocks >> offset & (1 << width) - 1).view(len(blocks), 8 // width, 8 * width)
        shifted = (plane[:, j] << (width * j) for j in range(8 // width))
        found.append(functools.reduce(torch.bitwise_or, shifted))
        offset += width
    return torch.cat(found, dim=1).flatten()


def from_stream(stored: Tensor, planes: Sequence[int]) -> Tensor:
    """Undo :func:`to_stream`, but for the zeros: uint8 [n + zeros]."""
    blocks = stored.view(-1, 8 * sum(planes))
    found, offset, first = stored.new_zeros(len(blocks), STEP), 0, 0
    for width in planes:
        plane = blocks[:, first : first + 8 * width]
        parts = [plane >> (width * j) & (1 << width) - 1 for j in range(8 // width)]
        found = found | torch.cat(parts, dim=1) << offset
        offset, first = offset + width, first + 8 * width
    return found.flatten()
