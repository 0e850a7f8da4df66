"""Tell choices that no other one beats in cost and score at once: a Pareto front.

score |  a                 a, b and c are the front; d is behind b
      |     b  d
      |            c
      '------------- cost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.errors import UsageError
from compressor.search.programme import Limit


@dataclass(frozen=True)
class Point:
    """Describe one choice, scored as a whole.

    Attributes:
        cost: sum of the measure.
        score: of what is lost; less is better.
        error: standard error of the score.
        choice: name of each item's alternative.
        uniform: it is the same in every layer.
        chosen: it was built.
        front: no other choice costs as little and loses as little.
    """

    cost: float
    score: float
    error: float
    choice: tuple[str, ...]
    uniform: bool
    chosen: bool
    front: bool = False


@dataclass(frozen=True)
class Front:
    """Hold choices by rising cost.

    Attributes:
        measure: of the cost.
        unit: of the cost, for people.
        whole: cost where all stays as it is.
        score: name of the score.
    """

    measure: str
    unit: str
    whole: float
    score: str
    points: Sequence[Point]


def with_front(points: Sequence[Point]) -> list[Point]:
    """Return points by rising cost, those of the front marked; of equals the first is in it."""
    least, found = float("inf"), []
    for point in sorted(points, key=lambda one: (one.cost, one.score)):
        found.append(replace(point, front=point.score < least))
        least = min(least, point.score)
    return found


def lowered(limits: Mapping[str, Limit], shares: Sequence[float]) -> dict[str, Limit]:
    """Return for each share the limits that it makes of each measure, under a name that says so."""
    return {
        f"{name} for the budget {share:g}": replace(limit, most=share * limit.sum([0] * len(limit.sizes)))
        for name, limit in limits.items()
        for share in shares
    }


def check_limits(pass_name: str, limits: Mapping[str, float | str | None], budgets: Sequence[float]) -> None:
    """Refuse no limit at all, shares that are none, and a front over several measures.

    Args:
        limits: by measure; None where there is none.
    Raises:
        UsageError: says what to give.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise UsageError(f"{pass_name}: give a limit: {', '.join([*limits][:-1])} or {[*limits][-1]}")
    latency = given.get("latency")
    if isinstance(latency, float) and not 0 < latency < 1:
        raise UsageError(f"{pass_name}: latency {latency:g} is not a share between 0 and 1")
    if any(not 0 < share < 1 for share in budgets):
        told = ", ".join(f"{share:g}" for share in budgets)
        raise UsageError(f"{pass_name}: budgets {told}: give shares of the whole model's between 0 and 1")
    if budgets and len(given) > 1:
        raise UsageError(f"{pass_name}: budgets: a front is over one measure; give one limit and not {len(given)}")
