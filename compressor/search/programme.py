"""Choose one alternative of each item under several limits at once, exactly, as a mixed-integer programme.

    least sum of costs,  one alternative of each item,  sum of sizes <= limit for each measure,
    each size <= limit for peaks, and at least two items other than in each choice that is excluded (no-good cuts)

Solved by HiGHS through :func:`scipy.optimize.milp`.  Puzzle (arXiv 2411.19146, section 4.2) states the same programme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.errors import UsageError
from compressor.search.knapsack import amount, solve

_LARGEST = 1e4  # the solver's tolerances are absolute, a millionth
_ROUNDING = 1e-9  # of a limit, for sums in another order


class UnreachableError(UsageError):
    """A limit that the smallest choice exceeds.

    Attributes:
        least: what the smallest choice takes.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


Rows = Sequence[Sequence[float]]
"""A figure of each item's alternatives."""


@dataclass(frozen=True)
class Limit:
    """Bound the sum of one measure.

    Attributes:
        sizes: of each item's alternatives; they may be below 0.
        rest: what is there whatever is chosen.
        most: the largest sum, with the rest.
        unit: for messages.
    """

    sizes: Rows
    rest: float
    most: float
    unit: str = ""

    def sum(self, picked: Sequence[int]) -> float:
        """Return what a choice takes."""
        return self.rest + sum(row[place] for row, place in zip(self.sizes, picked, strict=True))

    @property
    def least(self) -> float:
        """Return what the smallest choice takes."""
        return self.rest + sum(map(min, self.sizes))

    def row(self) -> tuple[list[float], float]:
        """Return a coefficient of every alternative, item after item, and the most that those chosen may sum to."""
        above = [size - min(row) for row in self.sizes for size in row]
        scale = _LARGEST / max(*above, 1e-300)
        room = max(0.0, self.most - self.least + self.rounding)
        return [size * scale for size in above], room * scale

    def least_under(self, others: Mapping[str, Limit]) -> float | None:
        """Return the least that is reached within other limits; None where nothing is."""
        low = min(min(row) for row in self.sizes)
        found = _solve([[size - low for size in row] for row in self.sizes], others)
        return None if found is None else self.sum(found)

    @property
    def rounding(self) -> float:
        """Return by how much sums in another order may differ."""
        return _ROUNDING * max(abs(self.most), abs(self.rest))

    def holds(self, amount: float) -> bool:
        """Tell whether an amount is within the limit."""
        return amount <= self.most + self.rounding


@dataclass(frozen=True)
class Peak(Limit):
    """Bound the largest of one measure, such as the memory that is taken at any time."""

    def sum(self, picked: Sequence[int]) -> float:
        """Return the largest of what a choice takes, and of what is there whatever is chosen."""
        return max(self.rest, *(row[place] for row, place in zip(self.sizes, picked, strict=True)))

    @property
    def least(self) -> float:
        """Return the peak of the smallest choice."""
        return max(self.rest, *map(min, self.sizes))

    def row(self) -> tuple[list[float], float]:
        """Return 1 for each alternative that is above the limit: none of them may be chosen."""
        return [float(size > self.most + self.rounding) for row in self.sizes for size in row], 0.0

    def least_under(self, others: Mapping[str, Limit]) -> float | None:
        """Return the lowest peak within other limits: the first of all sizes that some choice keeps to."""
        nothing = [[0.0] * len(row) for row in self.sizes]
        for most in sorted({max(self.least, size) for row in self.sizes for size in row}):
            if _solve(nothing, {**others, "": replace(self, most=most)}) is not None:
                return most
        return None


def choose(
    costs: Rows,
    limits: Mapping[str, Limit],
    excluded: Sequence[Sequence[int]] = (),
    above: Sequence[Sequence[int]] = (),
) -> list[int] | None:
    """Return the place of each item's alternative with the least sum of costs; None if all others are left out.

    The oracle is trying all choices.

    Args:
        costs: of each item's alternatives, not negative.
        limits: by measure.
        excluded: choices from which the new one differs in at least two items, or in one where there is one alone.
        above: choices that are known to be above a limit as wholes: the new one is none of them.
    Raises:
        UsageError: no choice is within the limits, though none is left out; names the limit that binds and the least
            that can be reached.
        ToolchainError: scipy is missing, or the solver failed.
    """
    check_reachable(limits)
    picked = _solve(costs, limits, excluded, above)
    if picked is None and not excluded and not above:
        raise UsageError("; ".join(_together(limits)))
    return picked


def restricted(
    costs: Rows,
    limits: Mapping[str, Limit],
    allowed: Sequence[Sequence[int]],
    excluded: Sequence[Sequence[int]] = (),
    above: Sequence[Sequence[int]] = (),
) -> list[int] | None:
    """Return as :func:`choose`, among some of each item's alternatives.

    Args:
        allowed: places of each item's alternatives that may be chosen.
    Raises:
        UsageError: as :func:`choose`.
    """

    def of(rows: Rows) -> list[list[float]]:
        return [[row[place] for place in places] for row, places in zip(rows, allowed, strict=True)]

    left = {name: replace(limit, sizes=of(limit.sizes)) for name, limit in limits.items()}

    def placed(several: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[_place(one, places) for one, places in zip(each, allowed, strict=True)] for each in several]

    picked = choose(of(costs), left, placed(excluded), placed(above))
    return None if picked is None else [places[one] for one, places in zip(picked, allowed, strict=True)]


def _place(one: int, places: Sequence[int]) -> int:
    return places.index(one) if one in places else -1  # which no choice has


def check_reachable(limits: Mapping[str, Limit]) -> None:
    """Refuse a limit that the smallest choice exceeds.

    Raises:
        UnreachableError: names the limit and the least that can be reached.
    """
    for name, limit in limits.items():
        if limit.least > limit.most + limit.rounding:
            raise UnreachableError(
                f"{name} of at most {amount(limit.most)}{limit.unit} cannot be met: the smallest architecture of this "
                f"space has {amount(limit.least)}{limit.unit}; raise it, or add smaller alternatives",
                limit.least,
            )


def _together(limits: Mapping[str, Limit]) -> list[str]:
    """Say of each limit what can be reached under the others."""
    told = []
    for name, limit in limits.items():
        others = {key: other for key, other in limits.items() if key != name}
        least = limit.least_under(others)
        reached = "nothing" if least is None else f"{amount(least)}{limit.unit}"
        told.append(f"under the other limits {name} reaches {reached} at least, above {amount(limit.most)}{limit.unit}")
    return told


def _solve(
    costs: Rows,
    limits: Mapping[str, Limit],
    excluded: Sequence[Sequence[int]] = (),
    above: Sequence[Sequence[int]] = (),
) -> list[int] | None:
    bounds: list[tuple[Sequence[float], float]] = [limit.row() for limit in limits.values()]
    for picked, apart in [*((one, min(2, len(costs))) for one in excluded), *((one, 1) for one in above)]:
        same = [float(place == chosen) for row, chosen in zip(costs, picked, strict=True) for place in range(len(row))]
        bounds.append((same, len(costs) - apart))
    return solve(costs, bounds)
