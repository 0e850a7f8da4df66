"""Parts of a search space that a programme looks at one by one, for what its sums cannot say.

Scores of sub-layers that go do not add up, so there is one scenario for each number of them, chosen beforehand in the
order of a ranking that ranks anew after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.search.space import Space


@dataclass(frozen=True)
class Scenario:
    """Alternatives that may be chosen together.

    Attributes:
        allowed: of each sub-layer, the places of its alternatives; at least one.
        is_free: sub-layers may go as their scores say.
    """

    allowed: tuple[tuple[int, ...], ...]
    is_free: bool


def scenarios(space: Space, ranked: Sequence[int] = ()) -> list[Scenario]:
    """List the scenarios of a space.

    Args:
        ranked: sub-layers that can go, in the order in which they do; where there are any, each number of them from
            none is a scenario, beside the free one.
    """
    found = [Scenario(tuple(tuple(range(len(row))) for row in space), True)]
    for count in range(len(ranked) + 1 if ranked else 0):
        gone = ranked[:count]
        fixed = [
            tuple(place for place, one in enumerate(row) if one.stays != (i in gone)) for i, row in enumerate(space)
        ]
        if all(fixed):
            found.append(Scenario(tuple(fixed), False))
    return found
