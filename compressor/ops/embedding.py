"""Rows of a table that is stored packed: schema, eager definition and fake kernel.

A table of floats is PyTorch's own ``embedding``; this is the same for a table in one of our formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, take_rows
from compressor.ops.register import operator


@operator("packed_embedding")
def packed_embedding(ids: Tensor, parts: Sequence[Tensor], format: str, rows: int, width: int) -> Tensor:
    """Look up rows of a packed table, as float32 [..., width].

    Activations that the format rounds are those of linears that share the table; rows are looked up as they are stored.

    Args:
        ids: whole numbers [...], from 0 to ``rows - 1``.
        parts: of the table [rows, width], as in :class:`compressor.formats.packing.PackedWeight`.
    """
    return take_rows(PackedWeight.of(parts, Format.parse(format), (rows, width)), ids)


@packed_embedding.register_fake
def _(ids: Tensor, parts: Sequence[Tensor], format: str, rows: int, width: int) -> Tensor:
    return ids.new_empty(*ids.shape, width, dtype=torch.float32)
