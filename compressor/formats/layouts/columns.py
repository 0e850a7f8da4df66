"""Which columns a tile keeps, as bits, and codes column by column in panels of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.parts import TILE_ROWS

WIDEST = 64
"""Columns of the widest blocks."""


def to_bits(columns: Tensor, in_features: int, width: int = 1) -> Tensor:
    """Return a bit for each block of ``width`` columns: int64 [tiles, kept] -> uint8 [tiles, 8 * ceil(blocks / 64)].

    Raises:
        ValueError: the columns are not whole blocks, or more than there are.
    """
    blocks, count = columns[:, ::width] // width, -(-in_features // width)
    if not torch.equal(of_blocks(blocks, width), columns) or int(blocks.max()) >= count:
        raise ValueError(f"columns that are not whole blocks of {width} of {in_features}")
    flags = torch.zeros(len(columns), count, dtype=torch.uint8).scatter_(1, blocks, 1)
    octets = pad(flags, (0, -count % 64)).view(len(columns), -1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def of_blocks(blocks: Tensor, width: int) -> Tensor:
    """Return the columns of blocks: int64 [tiles, n] -> [tiles, n * width]."""
    return (blocks[..., None] * width + torch.arange(width, device=blocks.device)).flatten(1)


def from_bits(bits: Tensor, kept: int, width: int = 1) -> Tensor:
    """Undo :func:`to_bits`: the columns rise.  No size depends on data, so that operators can be followed without any.

    Returns:
        int64 [tiles, kept].
    """
    flags = (bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    first = (1 - flags.flatten(1).to(torch.int8)).argsort(dim=1, stable=True)
    return of_blocks(first[:, : kept // width], width)


def put_columns(values: Tensor, columns: Tensor, in_features: int) -> Tensor:
    """Put kept columns where they belong, with zeros between them.

    Args:
        values: float [rows, kept], rows of whole tiles of 16 but for the last.
        columns: int64 [tiles, kept]; those beyond the last, which fill up a block, are dropped.
    Returns:
        float [rows, in].
    """
    tiles = columns[: -(-len(values) // TILE_ROWS)]  # those behind are of rows behind
    places = tiles.repeat_interleave(TILE_ROWS, dim=0)[: len(values)]
    return values.new_zeros(len(values), in_features + WIDEST - 1).scatter(1, places, values)[:, :in_features]


def to_panels(codes: Tensor, rows: int, bits: int) -> Tensor:
    """Store codes column by column: uint8 [out, in] -> uint8 [panels, in, bytes of ``rows`` rows].

    Of 8 bits, bytes are codes less 128, signed; of 4 bits, 16 bytes hold 32 rows, the first 16 in the lower halves.
    """
    panels = pad(codes, (0, 0, 0, -len(codes) % rows)).view(-1, rows, codes.shape[1]).mT
    if bits == 8:
        return (panels ^ 0x80).contiguous()
    halves = panels.reshape(*panels.shape[:2], -1, 2, 16)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2).contiguous()


def from_panel(stored: Tensor, bits: int) -> Tensor:
    """Undo :func:`to_panels` for one panel: uint8 [in, bytes] -> uint8 [rows, in]."""
    if bits == 8:
        return (stored ^ 0x80).T
    halves = stored.view(len(stored), -1, 1, 16)
    return torch.cat([halves & 15, halves >> 4], dim=-2).flatten(1).T
