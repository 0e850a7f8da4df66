"""Drafts are verified where that pays, by times that are measured, and cost next to nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.pace import Pace
from toy_target import ToyTarget

VOCAB = 40
FLAT: Callable[[int], float] = lambda rows: 1 + 0.02 * rows  # noqa: E731
STEEP: Callable[[int], float] = lambda rows: 0.3 + 0.7 * rows  # noqa: E731


def speedup(kind: str, table: np.ndarray, seconds: Callable[[int], float], draft_s: float, tokens: int) -> float:
    """Return simulated tokens per second with drafts over those without; each use of the clock takes ``draft_s``."""
    target = ToyTarget(table, seconds=seconds)

    def clock() -> float:
        target.now += draft_s / 4  # a draft reads the clock four times a round
        return target.now

    drafts = Drafts(VOCAB, Pace(clock))
    walk = drafts.tokens(
        target, np.array([[1, 2]]), Sampler(np.random.default_rng(0), 1.0, 0, 1.0), {}, tokens, Speculation(kind)
    )
    assert len(list(walk)) == tokens
    return tokens * seconds(1) / target.now


@pytest.mark.parametrize("kind", served({"verify"}))
def test_text_that_does_not_repeat_takes_no_longer(kind: str) -> None:
    noise = np.zeros((1, VOCAB))  # each token is as likely as any other
    for seconds in (FLAT, STEEP):
        assert speedup(kind, noise, seconds, 1e-4, 1500) > 0.98
    assert speedup(kind, noise, FLAT, 0.01, 1500) > 0.97  # a clock that takes a percent of a step is not the drafts'


@pytest.mark.parametrize("kind", served({"verify"}))
def test_text_that_repeats_takes_less_where_verifications_are_cheap(kind: str) -> None:
    table = np.random.default_rng(1).normal(scale=8, size=(VOCAB, VOCAB))  # nearly always one successor
    assert speedup(kind, table, FLAT, 1e-4, 600) > 2.5
    assert speedup(kind, table, STEEP, 1e-4, 600) > 0.98


def test_times_between_and_beyond_measured_sizes_lie_on_lines() -> None:
    pace = Pace()
    assert not pace.knows(1) and pace.choose([0.9], 1) == 0
    for seconds in (9.0, 1.0, 1.0):  # the first of a process takes longer
        pace.note(1, seconds)
    assert pace.seconds(1) == 1.0 and pace.seconds(5) == pytest.approx(1.12)  # a guess
    pace.note(5, 3.0)
    assert [pace.seconds(rows) for rows in (1, 3, 5, 9)] == pytest.approx([1, 2, 3, 5])
    assert pace.choose([0.4] * 8, 1) == 0
    assert pace.choose([0.9, 0.7, 0.52, 0.3], 1) == 2
    for _ in range(300):
        pace.note(1, 1.0)
    assert pace.seconds(5) == pytest.approx(1.12)  # long ago: worth another look


def test_what_waited_for_another_process_is_not_the_draft_s_fault() -> None:
    pace = Pace()
    for _ in range(3):
        pace.note(1, 1.0)
    pace.note(5, 100.0)
    assert pace.seconds(5) == pytest.approx(1.12)  # still a guess
    pace.settle(100.0, 1, {"a": 4}, {})
    pace.charge("a", 50.0)  # two steps are booked
    pace.delay(80.0, {"a": 4})  # and nothing
    assert pace.may_draft("a", 1)  # debts may be 2.46 steps
    pace.delay(1.5, {"a": 4})
    assert not pace.may_draft("a", 1)


def test_a_clock_that_stands_still_measures_nothing() -> None:
    pace = Pace()
    for seconds in (0.0, 0.0, 0.001):
        pace.note(1, seconds)
    assert not pace.knows(1) and pace.least_chance(1) > 0 and pace.choose([0.9], 1) == 0
    pace.note(1, 0.001)
    assert pace.knows(1) and pace.medians() == {1: 0.001} and pace.least_chance(1) > 0


def test_several_drafts_owe_as_much_as_one() -> None:
    pace = Pace()
    for _ in range(3):
        pace.note(1, 1.0)
    pace.charge("a", 1.5)
    assert pace.may_draft("a", 1) and not pace.may_draft("a", 1, 2)
