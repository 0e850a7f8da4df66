"""Store a bit for each weight that says whether it is kept, and the kept codes one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.layouts.words import from_stream, to_stream
from compressor.formats.parts import STEP, TILE_ROWS

_PIECE = 1 << 20  # weights that are spread at once: numbers of 64 bits say where from


def _by_step(grid: Tensor) -> Tensor:
    """Return [out, in], filled up, in the order of the bits: [tiles, steps, 16, 64]."""
    filled = pad(grid, (0, -grid.shape[1] % STEP, 0, -len(grid) % TILE_ROWS))
    return filled.view(-1, TILE_ROWS, filled.shape[1] // STEP, STEP).transpose(1, 2)


def to_mask(kept: Tensor) -> Tensor:
    """Return a bit for each weight: bool [out, in] -> uint8 [tiles, steps, 16, 8]."""
    flags = _by_step(kept).to(torch.uint8)
    found: Tensor = (flags.reshape(*flags.shape[:-1], STEP // 8, 8) << torch.arange(8, dtype=torch.uint8)).sum(
        -1, dtype=torch.uint8
    )
    return found


def from_mask(bits: Tensor) -> Tensor:
    """Return the flags of a mask in the order of its bits: uint8 [tiles, steps, 16, 64], 0 or 1."""
    found: Tensor = (bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(-2)
    return found


def keep_codes(codes: Tensor, kept: Tensor, planes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pack the codes of some weights: the stream uint8 [bytes], and the number of each tile's first, int32 [tiles].

    Args:
        codes: uint8 [out, in].
        kept: bool [out, in].
    """
    flags = _by_step(kept)
    counts = flags.flatten(1).sum(1)
    return to_stream(_by_step(codes)[flags], planes), (counts.cumsum(0) - counts).to(torch.int32)


def spread_codes(stream: Tensor, starts: Tensor, bits: Tensor, blank: Tensor, planes: Sequence[int]) -> Tensor:
    """Undo :func:`keep_codes`.  No size depends on data, so that operators can be followed without any.

    Args:
        blank: what the others are, uint8 [out, in].
    Returns:
        uint8 [out, in].
    """
    found, whole = from_stream(stream, planes), torch.empty_like(blank)
    tiles = max(1, _PIECE // (TILE_ROWS * blank.shape[1]))
    for first in range(0, len(bits), tiles):
        flags, rows = from_mask(bits[first : first + tiles]), slice(first * TILE_ROWS, (first + tiles) * TILE_ROWS)
        ranks = flags.flatten(1).long().cumsum(1) - 1 + starts[first : first + tiles, None].long()
        values = found[ranks.clamp(0, len(found) - 1)].view(flags.shape)
        piece = torch.where(flags > 0, values, _by_step(blank[rows])).transpose(1, 2).flatten(2).flatten(0, 1)
        whole[rows] = piece[: len(whole[rows]), : blank.shape[1]]
    return whole
