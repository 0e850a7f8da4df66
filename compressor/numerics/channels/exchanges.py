"""Deal items out to clusters of one size by exchanges between two clusters at a time.

All clusters meet in pairs, as the players of a tournament do: in each round every cluster has one partner, and all
pairs of a round exchange items at once.  After as many rounds as there are clusters each has met all others once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

LEAST_GAIN = 1e-6
"""Share of a value that an exchange has to add: the last bits of a sum must not decide."""


def rounds_of(count: int) -> Iterator[Tensor]:
    """Yield pairs of ``count`` clusters, int64 [2, pairs], round after round (the circle method), without end."""
    players = [*range(count), *([-1] if count % 2 else [])]
    while True:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield torch.tensor([pair for pair in pairs if min(pair) >= 0]).t()
        players = [players[0], players[-1], *players[1:-1]]


def exchange(order: Tensor, size: int, rounds: int, better: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Return an order of items in which no exchange of ``better`` helps, or the one after so many rounds.

    Args:
        order: int64 [items], cluster after cluster.
        size: items of a cluster.
        better: items of both clusters of each pair, int64 [pairs, 2 size] -> the same dealt out anew, and whether that
            is worth it, bool [pairs].
    """
    clusters, idle = order.view(-1, size).clone(), 0
    if len(clusters) < 2:
        return order
    for first, second in islice(rounds_of(len(clusters)), rounds):
        both = torch.cat([clusters[first], clusters[second]], dim=1)
        found, wins = better(both)
        both = torch.where(wins[:, None], found, both)
        clusters[first], clusters[second] = both[:, :size], both[:, size:]
        idle = 0 if bool(wins.any()) else idle + 1
        if idle >= len(clusters):  # every pair has met since the last exchange
            break
    return clusters.flatten()
