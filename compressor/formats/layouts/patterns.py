"""Which N of every M weights of a row are stored: a number for each group, in a stream of bits for each row."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.extras import KeptOfGroup
from compressor.formats.parts import TILE_ROWS


def combinations(pattern: KeptOfGroup) -> list[tuple[int, ...]]:
    """Return the columns of a group that each number keeps, in lexicographic order."""
    return list(itertools.combinations(range(pattern.size), pattern.kept))


@functools.cache
def _numbers(pattern: KeptOfGroup) -> dict[int, int]:
    """Return the number of each set of columns, by the sum of ``2 ** column``."""
    return {sum(1 << column for column in kept): number for number, kept in enumerate(combinations(pattern))}


def to_numbers(kept: Tensor, pattern: KeptOfGroup) -> Tensor:
    """Return the number of each group: bool [out, in] -> int64 [out, groups].

    Raises:
        ValueError: a group does not keep as many.
    """
    sets = (kept.view(len(kept), -1, pattern.size).long() << torch.arange(pattern.size)).sum(-1)
    known = _numbers(pattern)
    table = torch.full((1 << pattern.size,), -1)
    table[torch.tensor(list(known))] = torch.tensor(list(known.values()))
    numbers = table[sets]
    if bool((numbers < 0).any()):
        raise ValueError(f"{pattern.kept}:{pattern.size}: a group keeps more or fewer weights")
    return numbers


def from_numbers(numbers: Tensor, pattern: KeptOfGroup) -> Tensor:
    """Return the columns that are kept, rising: int64 [out, groups] -> int64 [out, kept]."""
    on = numbers.device
    columns = torch.tensor(combinations(pattern), device=on)[numbers]  # [out, groups, N]
    return (columns + torch.arange(numbers.shape[1], device=on)[:, None] * pattern.size).flatten(1)


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Lay numbers down in rows' streams of bits: int64 [out, groups] -> int32 [tiles, words, 16]."""
    stream = (numbers[..., None] >> torch.arange(bits) & 1).flatten(1)
    stream = pad(stream, (0, -stream.shape[1] % 32, 0, -len(stream) % TILE_ROWS))
    words = (stream.view(len(stream), -1, 32) << torch.arange(32)).sum(-1)  # below 2 ** 32
    words = torch.where(words >> 31 > 0, words - (1 << 32), words).to(torch.int32)
    return words.view(-1, TILE_ROWS, words.shape[1]).transpose(1, 2).contiguous()


def unpack_numbers(words: Tensor, bits: int, rows: int, groups: int) -> Tensor:
    """Undo :func:`pack_numbers`: int64 [rows, groups]."""
    of_rows = words.transpose(1, 2).flatten(0, 1)[:rows].long()
    places = torch.arange(32, device=words.device)
    stream = (of_rows[..., None] >> places & 1).flatten(1)[:, : groups * bits]
    return (stream.reshape(rows, groups, bits) << places[:bits]).sum(-1)
