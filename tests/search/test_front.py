"""Pareto fronts against the definition, and the limits that they are made of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.search.front import Point, check_limits, lowered, with_front
from compressor.search.programme import Limit


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both tell of the machine's load alone
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_front_is_what_nothing_beats(figures: list[tuple[int, int]]) -> None:
    marked = with_front([Point(cost, score, 0.0, (), False, False) for cost, score in figures])
    assert [one.cost for one in marked] == sorted(cost for cost, _ in figures)
    for one in marked:
        beaten = any(
            x.cost <= one.cost and x.score <= one.score and (x.cost, x.score) != (one.cost, one.score) for x in marked
        )
        equals = [x for x in marked if (x.cost, x.score) == (one.cost, one.score)]
        assert sum(x.front for x in equals) == (not beaten)


def test_budgets_are_shares_of_the_whole() -> None:
    limit = Limit([[4.0, 1.0], [6.0, 2.0]], 10.0, 19.0, " B")
    found = lowered({"bytes": limit}, (0.5, 0.75))
    assert {name: one.most for name, one in found.items()} == {
        "bytes for the budget 0.5": 10.0,
        "bytes for the budget 0.75": 15.0,
    }


@pytest.mark.parametrize(
    ("limits", "budgets", "message"),
    [
        ({"latency": None, "parameters": None}, (), "give a limit: latency or parameters"),
        ({"latency": 1.5}, (), "is not a share"),
        ({"parameters": 10.0}, (0.5, 2.0), "budgets 0.5, 2: give shares"),
        ({"latency": 0.5, "parameters": 10.0}, (0.5,), "give one limit and not 2"),
    ],
)
def test_refusals(limits: dict[str, float | None], budgets: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=f"^puzzle: .*{message}"):
        check_limits("puzzle", limits, budgets)
