"""The programme of several limits against trying all choices; limits that cannot be met say which and how far."""

from __future__ import annotations

import itertools
import random

import pytest

from compressor.errors import UsageError
from compressor.search.programme import Limit, Peak, choose, restricted

COUNTS = (2, 4, 3, 2, 4)
EVERY = list(itertools.product(*(range(count) for count in COUNTS)))


def problem(seed: int) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    draw = random.Random(seed)
    costs = [[0.0, *(draw.random() for _ in range(count - 1))] for count in COUNTS]
    seconds = [[0.0, *(draw.uniform(-1e-4, 1e-5) for _ in range(count - 1))] for count in COUNTS]
    sizes = [[1e6, *(draw.uniform(0, 1e6) for _ in range(count - 1))] for count in COUNTS]
    return costs, seconds, sizes


def cost(costs: list[list[float]], picked: list[int] | tuple[int, ...]) -> float:
    return sum(row[place] for row, place in zip(costs, picked, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_choices_are_those_of_brute_force(seed: int) -> None:
    costs, seconds, sizes = problem(seed)
    limits = {"latency": Limit(seconds, 1e-3, 0.85e-3, " s"), "weight_bytes": Limit(sizes, 3e5, 3.9e6)}
    if seed % 2:  # the largest of the sizes, from a place on that is not the whole's
        limits = {"latency": Limit(seconds, 1e-3, 0.92e-3, " s"), "weight_bytes": Limit(sizes, 3e5, 4.5e6)}
        limits["peak_memory"] = Peak([row[::-1] for row in sizes], 1e5, 0.95e6)
    found: list[list[int]] = []
    for _ in range(3):
        within = [
            one
            for one in EVERY
            if all(limit.holds(limit.sum(one)) for limit in limits.values())
            and all(sum(a != b for a, b in zip(one, other, strict=True)) >= 2 for other in found)
        ]
        picked = choose(costs, limits, found)
        if not within:
            assert found and picked is None
            break
        assert picked is not None and tuple(picked) in within
        assert cost(costs, picked) == pytest.approx(min(cost(costs, one) for one in within), rel=1e-9)
        found.append(picked)


def test_choices_that_are_above_a_limit_are_left_out_alone() -> None:
    """Those that differ in one item from them may be chosen."""
    costs, seconds, _ = problem(2)
    limits, above = {"latency": Limit(seconds, 1e-3, 0.85e-3, " s")}, list[list[int]]()
    for one in sorted(
        (one for one in EVERY if limits["latency"].holds(limits["latency"].sum(one))), key=lambda one: cost(costs, one)
    )[:8]:
        picked = choose(costs, limits, above=above)
        assert picked is not None and cost(costs, picked) == pytest.approx(cost(costs, one), rel=1e-9)
        above.append(picked)


def test_restricted_choices_are_those_of_brute_force() -> None:
    costs, seconds, _ = problem(1)
    limits = {"latency": Limit(seconds, 1e-3, 0.9e-3, " s")}
    allowed, found = [(0, 1), (1, 3), (2,), (0, 1), (0, 2, 3)], list[list[int]]()
    for _ in range(2):
        within = [
            one
            for one in itertools.product(*allowed)
            if limits["latency"].holds(limits["latency"].sum(one))
            and all(sum(a != b for a, b in zip(one, other, strict=True)) >= 2 for other in found)
        ]
        picked = restricted(costs, limits, allowed, found)
        assert picked is not None and tuple(picked) in within
        assert cost(costs, picked) == pytest.approx(min(cost(costs, one) for one in within), rel=1e-9)
        found.append(picked)


def test_no_choice_is_left() -> None:
    assert choose([[0.0, 1.0]], {"bytes": Limit([[2.0, 1.0]], 0, 5)}, [[0], [1]]) is None


def test_limits_that_cannot_be_met_name_the_least() -> None:
    sizes, others = [[10.0, 4.0], [10.0, 5.0]], [[4.0, 10.0], [5.0, 10.0]]
    with pytest.raises(UsageError, match=r"weight_bytes of at most 100 cannot be met: the smallest .* has 109;"):
        choose([[0.0, 1.0]] * 2, {"weight_bytes": Limit(sizes, 100, 100)})
    both = {"weight_bytes": Limit(sizes, 0, 12), "parameters": Limit(others, 0, 12)}
    message = r"the other limits weight_bytes reaches 20 at least, above 12; .* parameters reaches 20 at least"
    with pytest.raises(UsageError, match=message):
        choose([[0.0, 1.0]] * 2, both)


def test_a_peak_that_cannot_be_met_names_the_lowest() -> None:
    sizes, memory = [[10.0, 4.0], [10.0, 5.0]], [[3.0, 8.0], [6.0, 9.0]]
    with pytest.raises(UsageError, match=r"peak_memory of at most 5 cannot be met: the smallest .* has 7;"):
        choose([[0.0, 1.0]] * 2, {"peak_memory": Peak(memory, 7, 5)})
    both = {"weight_bytes": Limit(sizes, 0, 14), "peak_memory": Peak(memory, 7, 7)}
    for most, lowest in ((14, 8), (9, 9)):  # one sub-layer has to be small, or both
        both["weight_bytes"] = Limit(sizes, 0, most)
        with pytest.raises(UsageError, match=rf"the other limits peak_memory reaches {lowest} at least, above 7"):
            choose([[0.0, 1.0]] * 2, both)
