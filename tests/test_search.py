"""Choices under a budget against trying them all."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ToolchainError, UsageError
from compressor.search import choose_within

ITEM = st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 50)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(st.lists(ITEM, min_size=1, max_size=5), st.floats(0, 1))
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


def test_a_budget_below_the_smallest_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="10, is less than the smallest choice takes, 12"):
        choose_within([[1, 0], [1, 0]], [[5, 9], [7, 8]], 10)
    assert choose_within([[0.0], [0.0]], [[5], [7]], 12) == [0, 0]


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ToolchainError, match=r"compressor\[search\]"):
        choose_within([[0.0]], [[1]], 1)
