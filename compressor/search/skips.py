"""Choose which parts of a model its drafts leave out: a knapsack of measured times against measured agreement.

The problem is that of SWIFT (arXiv:2410.06916, section 3.2), which asks Bayesian optimisation for masks of a fixed
number of parts.  Here each part alone is left out once; the negative logarithms of the agreements add up, as if parts
erred independently, which ranks choices; for each share of the time the best choice is found exactly, and then all of
these are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compressor_runtime.speculation.cost import Forecast, forecast

from compressor.search.knapsack import choose_within

_SHARES = tuple(tenths / 10 for tenths in range(1, 10))
"""Shares of the parts' time that drafts may take."""
_LEAST_AGREEMENT = 1e-3
"""Smaller agreements count as this one, since logarithms are taken."""
KEPT_SUBSETS = 4
"""Subsets that a bundle lists at most."""


@dataclass(frozen=True)
class Skips:
    """A choice of parts that drafts leave out.

    Attributes:
        without: their indices, rising; at least one.
        expected: of drafts without them, by agreement, time, and the times of verifications.
    """

    without: tuple[int, ...]
    expected: Forecast


def choose_skips(
    seconds: Sequence[float],
    other_s: float,
    step_s: float,
    verification: Sequence[float],
    measure: Callable[[list[tuple[int, ...]]], Sequence[float]],
) -> list[Skips]:
    """Return the choices that are worth having, the one that promises most tokens per second first.

    Args:
        seconds: of each part of the model for one token.
        other_s: of what every draft runs.
        step_s: of a step of the whole model.
        verification: time of verifying k drafted tokens with the one before them, for k = 1, 2, ..., in steps.
        measure: choices -> how often drafts without these parts agree with the whole model.
    Returns:
        at least one, at most :data:`KEPT_SUBSETS`; none agrees less often than another one that is as fast.
    """
    alone: list[tuple[int, ...]] = [(index,) for index in range(len(seconds))]
    agreement = dict(zip(alone, measure(alone), strict=True))
    costs = [[0.0, -math.log(max(agreement[one], _LEAST_AGREEMENT))] for one in alone]
    found = dict.fromkeys(skips_within(costs, seconds, share * sum(seconds)) for share in _SHARES)
    new = [one for one in found if one and one not in agreement]
    agreement |= zip(new, measure(new) if new else [], strict=True)
    skips = []
    for without, value in agreement.items():
        left = other_s + sum(time_s for index, time_s in enumerate(seconds) if index not in without)
        skips.append(Skips(without, forecast(value, left / step_s, verification)))
    skips.sort(key=lambda one: -one.expected.speedup)
    front = [one for one in skips if not any(_is_better(other, one) for other in skips)]
    return front[:KEPT_SUBSETS]


def skips_within(costs: Sequence[Sequence[float]], seconds: Sequence[float], budget_s: float) -> tuple[int, ...]:
    """Return the parts to leave out so that the others take at most ``budget_s``, at the least sum of costs.

    Args:
        costs: of each part, kept and left out.
    """
    picked = choose_within(costs, [[time_s, 0.0] for time_s in seconds], budget_s)
    return tuple(index for index, is_out in enumerate(picked) if is_out)


def _is_better(one: Skips, than: Skips) -> bool:
    """Return whether a choice agrees as often and is as fast, and is better in one of both."""
    a, b = one.expected, than.expected
    ahead = (a.acceptance, -a.draft_cost) != (b.acceptance, -b.draft_cost)
    return ahead and a.acceptance >= b.acceptance and a.draft_cost <= b.draft_cost
