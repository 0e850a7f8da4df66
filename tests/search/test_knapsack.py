"""Choices under a budget against trying them all."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compressor.errors import ToolchainError, UsageError
from compressor.search.knapsack import choose_within

ITEM = st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 50)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(st.lists(ITEM, min_size=1, max_size=5), st.floats(0, 1))
@example([[(2.0**-1030, 1), (0.0, 2)]], 1.0)
def test_the_choice_is_the_best_of_all(items: list[list[tuple[float, int]]], fraction: float) -> None:
    costs = [[cost for cost, _ in item] for item in items]
    sizes = [[float(size) for _, size in item] for item in items]
    least, most = (sum(pick(item) for item in sizes) for pick in (min, max))
    budget = round(least + fraction * (most - least))
    chosen = choose_within(costs, sizes, budget)

    def total(table: list[list[float]], picks: tuple[int, ...]) -> float:
        return sum(row[i] for row, i in zip(table, picks, strict=True))

    every = itertools.product(*(range(len(item)) for item in items))
    best = min(total(costs, picks) for picks in every if total(sizes, picks) <= budget)
    assert total(sizes, tuple(chosen)) <= budget
    assert total(costs, tuple(chosen)) == pytest.approx(best, rel=1e-6, abs=1e-6 * max(map(max, costs)))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.tuples(st.integers(10**8, 10**9), st.floats(1e-6, 1)), min_size=1, max_size=4), min_size=1,
                max_size=5), st.floats(0, 1), st.sampled_from([1e-6, 1.0, 1e6]))  # fmt: skip
def test_costs_may_be_large_and_sizes_small(items: list[list[tuple[int, float]]], fraction: float, unit: float) -> None:
    costs = [[float(cost) for cost, _ in item] for item in items]
    sizes = [[size * unit for _, size in item] for item in items]
    least, most = (sum(pick(item) for item in sizes) for pick in (min, max))
    budget = least + fraction * (most - least)
    chosen = choose_within(costs, sizes, budget)
    picks = [*itertools.product(*(range(len(item)) for item in items))]
    table = [(sum(c[i] for c, i in zip(costs, pick, strict=True)), sum(s[i] for s, i in zip(sizes, pick, strict=True)))
             for pick in picks]  # fmt: skip
    cost, size = table[picks.index(tuple(chosen))]
    assert size <= budget * (1 + 1e-11)
    assert cost <= min(c for c, s in table if s <= budget) * (1 + 1e-9)


def test_a_budget_below_the_smallest_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="10, is less than the smallest choice takes, 12"):
        choose_within([[1, 0], [1, 0]], [[5, 9], [7, 8]], 10)
    with pytest.raises(UsageError, match=r"0\.01, is less than the smallest choice takes, 0\.0123"):
        choose_within([[1, 2]], [[0.0123, 0.02]], 0.01)
    assert choose_within([[0.0], [0.0]], [[5], [7]], 12) == [0, 0]
    # A billionth over the budget is over the budget.
    assert choose_within([[0.0, 1.0]], [[10**9 + 1, 10**9]], 10**9) == [1]


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ToolchainError, match=r"compressor\[search\]"):
        choose_within([[0.0]], [[1]], 1)
