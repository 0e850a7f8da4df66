"""Choices of the parts that drafts leave out, against trying them all."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from compressor_runtime.speculation.cost import forecast

from compressor.search.skips import KEPT_SUBSETS, choose_skips, skips_within

VERIFICATION = [1 + 0.05 * rows for rows in range(1, 9)]


def every_choice(count: int) -> list[tuple[int, ...]]:
    return [one for size in range(1, count + 1) for one in itertools.combinations(range(count), size)]


def test_within_a_time_the_least_costs_are_left_out() -> None:
    numbers = random.Random(4)
    for _ in range(10):
        seconds = [numbers.uniform(0.5, 2) for _ in range(6)]
        costs = [[0.0, numbers.uniform(0, 1)] for _ in seconds]
        budget = numbers.uniform(0.1, 0.9) * sum(seconds)
        found = skips_within(costs, seconds, budget)
        fits = [one for one in [(), *every_choice(6)] if sum(seconds) - sum(seconds[i] for i in one) <= budget]
        best = min(sum(costs[i][1] for i in one) for one in fits)
        assert found in fits and sum(costs[i][1] for i in found) == pytest.approx(best, rel=1e-6)


def test_choices_are_measured_together_and_the_best_stands_first() -> None:
    """Parts that err independently: no choice of all is worth more than the first, but for the steps of budgets."""
    right, seconds, calls = [0.99, 0.8, 0.98, 0.97, 0.6, 0.95], [1.0, 2.0, 1.5, 1.0, 2.0, 0.5], list[int]()

    def measure(choices: list[tuple[int, ...]]) -> list[float]:
        calls.append(len(choices))
        return [math.prod(right[i] for i in one) for one in choices]

    found = choose_skips(seconds, 0.5, 9.0, VERIFICATION, measure)

    def speedup(one: tuple[int, ...]) -> float:
        left = 0.5 + sum(seconds[i] for i in range(6) if i not in one)
        return forecast(math.prod(right[i] for i in one), left / 9, VERIFICATION).speedup

    assert len(calls) == 2 and calls[0] == 6 and 1 <= calls[1] <= 9
    assert [one.expected.speedup for one in found] == [pytest.approx(speedup(one.without)) for one in found]
    assert found[0].expected.speedup == max(one.expected.speedup for one in found)
    assert found[0].expected.speedup > 0.98 * max(map(speedup, every_choice(6)))
    assert len(found) <= KEPT_SUBSETS
    for one, other in itertools.permutations((one.expected for one in found), 2):
        assert one.acceptance > other.acceptance or one.draft_cost < other.draft_cost or one == other


def test_where_nothing_pays_the_figures_say_so() -> None:
    """Every part matters: a draft is right half of the time, whatever is left out, and takes most of a step."""
    found = choose_skips([1.0] * 4, 1.0, 5.0, VERIFICATION, lambda choices: [0.5 ** len(one) for one in choices])
    assert not found[0].expected.pays
    assert str(found[0].expected).startswith("would not pay: a draft step costs 0.") and "x expected" in str(
        found[0].expected
    )
