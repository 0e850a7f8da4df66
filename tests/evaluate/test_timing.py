"""The interval of the median against enumeration and simulation."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.evaluate.timing import CONFIDENCE, Timing, collect, median_interval, record


def misses(n: int, k: int) -> float:
    """Chance that [k-th smallest, k-th largest] of n samples misses the median: by all ways to fall about it."""
    falls = itertools.product((-1, 1), repeat=n)  # each sample below or above the median, 0, with equal chance
    return sum(not sorted(fall)[k - 1] < 0 < sorted(fall)[n - k] for fall in falls) / 2**n


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("error", [0.3, 0.05, 0.05 / 3, 0.002])
def test_the_interval_is_the_narrowest_that_is_certain_enough(n: int, error: float) -> None:
    found = median_interval(range(1, n + 1), error)
    certain = [k for k in range(1, n // 2 + 1) if misses(n, k) <= error]
    assert found == ((max(certain), n + 1 - max(certain)) if certain else None)


def test_known_intervals() -> None:
    """Of the sign test's tables: 95% for 6, 10 and 25 samples; and 95% over three looks from 7 on."""
    assert [median_interval(range(1, n + 1), 0.05) for n in (5, 6, 10, 25)] == [None, (1, 6), (2, 9), (8, 18)]
    ends = [Timing(tuple(range(1, n + 1)), looks=3).interval for n in (6, 7, 14, 28)]
    assert ends == [None, (1, 7), (3, 12), (8, 21)]


@pytest.mark.parametrize("n", [7, 14, 28])
def test_coverage_whatever_the_distribution(n: int) -> None:
    """Log-normal noise and, one time in five, an interruption: skewed and of two kinds, as timings are."""
    rng = np.random.default_rng(0)
    samples = rng.lognormal(0, 0.3, (4000, n)) * rng.choice([1, 4], (4000, n), p=[0.8, 0.2])
    long = np.random.default_rng(1)
    median = np.median(long.lognormal(0, 0.3, 10**6) * long.choice([1, 4], 10**6, p=[0.8, 0.2]))
    held = 0
    for row in samples.tolist():
        ends = Timing(tuple(row)).interval
        assert ends is not None
        held += ends[0] <= median <= ends[1]
    assert CONFIDENCE - 0.01 < held / 4000 < 0.995  # and not by being needlessly wide


def test_looking_again_does_not_make_errors_likelier() -> None:
    """A gate exactly at the median, which has no right answer, is decided in at most 5% of runs of three looks."""
    rng = np.random.default_rng(2)
    decided = careless = 0
    for row in rng.exponential(1, (4000, 28)).tolist():
        for looks in (3, 1):
            ends = [Timing(tuple(row[:n]), looks).interval for n in (7, 14, 28)]
            wrong = any(end is not None and not end[0] <= math.log(2) <= end[1] for end in ends)
            decided += wrong and looks == 3
            careless += wrong and looks == 1
    assert decided / 4000 <= 0.05 < careless / 4000


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_intervals_hold_the_median_of_the_samples(samples: list[float]) -> None:
    timing = Timing(tuple(samples), looks=3)
    assert timing.median == statistics.median(samples)
    ends = timing.interval
    assert (ends is None) == (len(samples) < 7)
    assert ends is None or min(samples) <= ends[0] <= timing.median <= ends[1] <= max(samples)


def test_a_drift_that_meets_both_cancels_out_of_their_ratios() -> None:
    drift = [1.0, 1.3, 0.8, 2.0, 1.1, 4.0, 0.9]
    ours, dense = (Timing(tuple(figure * slow for slow in drift)) for figure in (3.0, 2.0))
    ratio = ours.over(dense)
    assert ratio.samples == pytest.approx([1.5] * 7)
    assert ratio.spread < 1e-9 < 1 < ours.spread
    with pytest.raises(ValueError, match="shorter"):
        ours.over(Timing((1.0,)))


def test_the_record_has_samples_intervals_and_ratios() -> None:
    timings = collect([{"latency_ms": float(n), "dense_latency_ms": 2.0 * n, "load_s": 1.0} for n in range(1, 8)])
    content = record(timings)
    assert content["confidence"] == CONFIDENCE
    assert content["figures"]["latency_ms"] == {"interval": (1, 7), "samples": (1, 2, 3, 4, 5, 6, 7)}
    assert content["ratios"] == {"latency_ms": {"median": 0.5, "interval": (0.5, 0.5)}}
