"""Random trees of tokens behind sequences of different lengths, for tests of verification."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

Trees = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_trees(pick: random.Random, stored: Sequence[int], counts: Sequence[int], chain: bool = False) -> Trees:
    """Return position, parent, slot and row, int64 [T], of so many tokens behind each sequence, mixed at random.

    Args:
        stored: tokens of each sequence.
        counts: new tokens of each.
        chain: every token follows the one before it in its sequence.
    """
    order = [slot for slot, count in enumerate(counts) for _ in range(count)]
    pick.shuffle(order)
    own: dict[int, list[int]] = {slot: [] for slot in range(len(counts))}
    position, parent, row = list[int](), list[int](), list[int]()
    for t, slot in enumerate(order):
        before = own[slot]
        parent.append((before[-1] if chain else pick.choice([-1, *before])) if before else -1)
        position.append(stored[slot] if parent[-1] < 0 else position[parent[-1]] + 1)
        row.append(stored[slot] + len(before))
        before.append(t)
    position_, parent_, slot_, row_ = (torch.tensor(x) for x in (position, parent, order, row))
    return position_, parent_, slot_, row_


def path_to(parent: Sequence[int], t: int) -> list[int]:
    """Return the tokens from a root to ``t``."""
    path = [t]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path
