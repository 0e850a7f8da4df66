"""How much of each linear is left out: OWL against its formulas, and never more bytes than the same share of all."""

from __future__ import annotations

import re
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.sites import Site
from compressor.search.sparsity import by_budget, by_outliers, check_schemes, levels, stored_bytes

SHAPE = st.tuples(st.integers(1, 90), st.integers(1, 200))
SEGMENTS = st.lists(st.lists(st.tuples(SHAPE, st.integers(0, 50)), min_size=1, max_size=3), min_size=1, max_size=4)


def site(name: str, rows: int, columns: int) -> Site:
    node = cast(Node, None)
    return Site(name, node, node, "Linear", f"{name}.weight", None, columns, rows, False)


@settings(deadline=None, max_examples=60)
@given(SEGMENTS, st.sampled_from(["W8A16_B16x1@50", "W8A8_B1x1@90", "W4A16_G32_B16x1@30"]), st.floats(0.01, 0.5))
def test_owl_is_its_formula_in_no_more_bytes(
    given_segments: list[list[tuple[tuple[int, int], int]]], name: str, most: float
) -> None:
    fmt, segments, outliers = Format.parse(name), [], {}
    for number, given_sites in enumerate(given_segments):
        segments.append([site(f"{number}.{i}", *shape) for i, (shape, _) in enumerate(given_sites)])
        outliers |= {f"{number}.{i}": float(count) for i, (_, count) in enumerate(given_sites)}
    chosen = by_outliers(segments, outliers, fmt, most)
    every = [each for sites in segments for each in sites]
    assert stored_bytes(every, chosen) <= stored_bytes(every, {each.name: fmt for each in every})
    # The paper's shares, from which all have fallen by as much.
    sizes = [sum(s.out_features * s.in_features for s in sites) for sites in segments]
    ratios = [sum(outliers[s.name] for s in sites) / size for sites, size in zip(segments, sizes, strict=True)]
    spread = max(ratios) - min(ratios)
    shares = [2 * most * (ratio - min(ratios)) / spread if spread else 0.0 for ratio in ratios]
    mean = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
    percents = [percent(chosen[sites[0].name]) for sites in segments]
    fallen = []
    for sites, share, found in zip(segments, shares, percents, strict=True):
        assert all(percent(chosen[each.name]) == found for each in sites)
        if 0.01 < found < 99.99:
            fallen.append(found - (percent(fmt) - 100 * (share - mean)))
    assert max(percents) - min(percents) <= 200 * most + 0.02
    if fallen:
        assert max(fallen) - min(fallen) <= 0.02 and min(fallen) >= -0.01 and max(fallen) <= 200 * most + 0.02


def percent(fmt: Format) -> float:
    return float(re.split("@", fmt.name)[1])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(SHAPE, st.lists(st.floats(0, 1), min_size=5, max_size=5)), min_size=1, max_size=5))
def test_a_budget_has_no_more_bytes_and_no_more_error(items: list[tuple[tuple[int, int], list[float]]]) -> None:
    formats = levels(Format.parse("W8A16_B16x1@80"))
    assert [percent(fmt) for fmt in formats] == [80, 90, 86, 72, 60]
    sites = [site(str(i), *shape) for i, (shape, _) in enumerate(items)]
    errors = {str(i): row for i, (_, row) in enumerate(items)}
    chosen = by_budget(sites, formats, errors)
    assert stored_bytes(sites, chosen) <= stored_bytes(sites, {each.name: formats[0] for each in sites})
    assert sum(errors[name][formats.index(fmt)] for name, fmt in chosen.items()) <= (
        sum(row[0] for row in errors.values()) + 1e-9
    )


def test_levels_stay_above_nothing_left_out() -> None:
    assert [percent(fmt) for fmt in levels(Format.parse("W8A16_B16x1@40"))] == [40, 70, 58, 16]


def test_schemes_that_leave_nothing_out_are_named() -> None:
    with pytest.raises(UsageError, match="wanda: schemes: W4A16_G128 leaves nothing out"):
        check_schemes("wanda", "W8A16_B16x1@50", ["W4A16_G128"])
