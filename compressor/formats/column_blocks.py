"""Bits that say which columns each tile of 16 rows keeps, and weights that hold only these columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_bits(columns: Tensor, in_features: int) -> Tensor:
    """Return a bit for each column: int64 [tiles, kept] -> uint8 [tiles, 8 * ceil(in / 64)]."""
    flags = torch.zeros(len(columns), in_features, dtype=torch.uint8).scatter_(1, columns, 1)
    octets = pad(flags, (0, -in_features % 64)).view(len(columns), -1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def from_bits(bits: Tensor, kept: int) -> Tensor:
    """Undo :func:`to_bits`: the columns rise.  No size depends on data, so that operators can be followed without any.

    Returns:
        int64 [tiles, kept].
    """
    flags = (bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    first = (1 - flags.flatten(1).to(torch.int8)).argsort(dim=1, stable=True)
    return first[:, :kept]


def spread(values: Tensor, columns: Tensor, in_features: int) -> Tensor:
    """Put kept columns where they belong, with zeros between them.

    Args:
        values: float [rows, kept], rows of whole tiles of 16 but for the last.
        columns: int64 [tiles, kept].
    Returns:
        float [rows, in].
    """
    places = columns.repeat_interleave(16, dim=0)[: len(values)]
    return values.new_zeros(len(values), in_features).scatter(1, places, values)
