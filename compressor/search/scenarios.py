"""Parts of a search space that a programme looks at one by one, for what its sums cannot say.

caches   all layers' caches have as many heads                 one scenario for each number of heads
depth    scores of sub-layers that go do not add up            one for each number of them, chosen beforehand in the
                                                               order of a ranking that ranks anew after each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.search.space import Alternative, Space, SubLayer


@dataclass(frozen=True)
class Scenario:
    """Alternatives that may be chosen together.

    Attributes:
        allowed: of each sub-layer, the places of its alternatives; at least one.
        is_free: sub-layers may go as their scores say.
    """

    allowed: tuple[tuple[int, ...], ...]
    is_free: bool


def scenarios(layers: Sequence[SubLayer], space: Space, ranked: Sequence[int] = ()) -> list[Scenario]:
    """List the scenarios of a space.

    Args:
        ranked: sub-layers that can go, in the order in which they do; where there are any, each number of them from
            none is a scenario, beside the free one.
    """
    found = []
    counts = {layer.heads_left(one) for layer, row in zip(layers, space, strict=True) for one in row} - {0}
    for heads in sorted(counts) or [0]:
        allowed = [
            [place for place, one in enumerate(row) if layer.heads_left(one) in (0, heads)]
            for layer, row in zip(layers, space, strict=True)
        ]
        if not all(allowed):
            continue
        found.append(Scenario(tuple(map(tuple, allowed)), True))
        for count in range(len(ranked) + 1 if ranked else 0):
            gone = ranked[:count]
            fixed = [
                tuple(place for place in places if row[place].stays != (i in gone))
                for i, (row, places) in enumerate(zip(space, allowed, strict=True))
            ]
            if all(fixed):
                found.append(Scenario(tuple(fixed), False))
    return found


def is_even(layers: Sequence[SubLayer], picks: Sequence[Alternative]) -> bool:
    """Tell whether all caches that stay have as many heads."""
    return len({layer.heads_left(one) for layer, one in zip(layers, picks, strict=True)} - {0}) <= 1
