"""Drafts of a model without some of its parts: which subset drafts next."""

from __future__ import annotations

from compressor_runtime.speculation.kinds.skips import Choice
from compressor_runtime.speculation.pace import Pace

NAMES = ("attention_0", "ffn_0", "attention_1", "ffn_1")
FACTS = [
    {"without": ["attention_1", "ffn_1"], "agreement": 0.9, "cost": 0.5},
    {"without": ["ffn_1"], "agreement": 0.95, "cost": 0.75},
]


def measured_pace() -> Pace:
    """Return a pace that has seen steps of 1 s, and verifications that take hardly more."""
    pace = Pace(lambda: 0.0)
    for rows in (1, 1, 5, 5, 9, 9):
        pace.note(rows, 1 + 0.01 * rows)
    return pace


def test_the_subset_that_promises_most_drafts_and_others_are_tried_again() -> None:
    choice, pace = Choice(FACTS, NAMES), measured_pace()
    assert [one.kept for one in choice.subsets] == [(0, 1), (0, 1, 2)]
    picked = [choice.next(pace) for _ in range(48)]
    assert picked == ([0] * 15 + [1]) * 3
    for _ in range(60):  # the first one is wrong most of the time here
        choice.subsets[0].agreement.add(False)
    assert picked[0] == 0 and choice.next(pace) == 1
    assert [choice.next(pace) for _ in range(15)].count(0) == 1
    for _ in range(120):
        choice.subsets[0].agreement.add(True)
    assert choice.next(pace) == 0, "texts change"


def test_measured_times_take_the_place_of_stated_ones() -> None:
    choice, pace = Choice(FACTS, NAMES), measured_pace()
    choice.subsets[0].seconds.extend([1.2, 1.2])
    assert choice.next(pace) == 1
    assert choice.next(Pace(lambda: 0.0)) == 0, "where no step was measured, stated ones hold"
