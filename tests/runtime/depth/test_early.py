"""Tokens that leave early: logits of their exits over whole caches, blocks that run late, texts that are given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compressor_runtime.depth.early import EarlyExits, top_probability
from compressor_runtime.generation import Depth
from compressor_runtime.speculation.engine import MOST_ROWS
from toy_stages import VOCABULARY, ToyModel

IDS = np.random.default_rng(1).integers(0, VOCABULARY, 60).tolist()
BLOCKS = 5


def early(model: ToyModel, after: list[int], thresholds: list[float], **more: Any) -> EarlyExits:
    """Begin behind a prompt of no tokens."""
    facts = {"blocks": after, "thresholds": thresholds, "give_up": 0.0, "window": 3, **more}
    positions = iter(range(1000))
    return EarlyExits(model.stages, facts, lambda ids: ids, lambda count: next(positions), Depth(BLOCKS))


@pytest.mark.parametrize(("after", "shares"), [([3], [0.5]), ([1, 2], [0.6, 0.7]), ([2, 4], [0.4, 1.0]), ([3], [1.0])])
def test_a_token_is_that_of_the_first_exit_that_is_sure(after: list[int], shares: list[float]) -> None:
    """Logits are those of the exit's blocks over the whole model's keys and values, whatever ran late."""
    model, ids = ToyModel([0, *after, BLOCKS]), IDS[: MOST_ROWS - 1]
    reference = model.whole(ids)
    confidences = [sorted(map(top_probability, reference[:, count])) for count in after]
    thresholds = [
        2.0 if share == 1 else row[int(share * len(ids))] for row, share in zip(confidences, shares, strict=True)
    ]
    thresholds = [threshold - 1e-9 for threshold in thresholds]
    steps = early(model, after, thresholds)
    depths, left = [*after, BLOCKS], []
    for place, token in enumerate(ids):
        sure = [
            top_probability(reference[place, count]) >= least for count, least in zip(after, thresholds, strict=True)
        ]
        left.append([*sure, True].index(True))
        found = steps.step(token)
        np.testing.assert_allclose(found, reference[place, depths[left[-1]]], rtol=1e-9, err_msg=str(place))
    assert thresholds[0] > 1 or 0 < left.count(0) < len(ids), "else there is nothing to run late"
    ran = 0  # a stage has run for the tokens up to the last that went there
    for number, count in enumerate(np.diff([0, *depths])):
        reached = [place for place, exit_place in enumerate(left) if exit_place >= number]
        ran += int(count) * (max(reached, default=-1) + 1)
    assert steps.depth.ran == ran and steps.depth.tokens == len(ids)
    assert steps.depth.blocks_per_token == ran / len(ids)
    tried = [sum(least <= 1 for least in thresholds[: exit_place + 1]) for exit_place in left]
    assert steps.depth.heads == sum(tried) + left.count(len(after))


def test_no_more_rows_run_at_once_than_have_the_bits_of_one() -> None:
    model = ToyModel([0, 2, 3, BLOCKS])
    steps, reference = early(model, [2, 3], [0.0, 0.0]), model.whole(IDS)
    for place, token in enumerate(IDS):
        found = steps.step(token)
        forced = place % MOST_ROWS == MOST_ROWS - 1  # the first exit takes the others
        np.testing.assert_allclose(found, reference[place, 3 if forced else 2], rtol=1e-9)
    assert max(rows for _, rows in model.calls) == MOST_ROWS
    assert steps.depth.late == MOST_ROWS - 1


def test_a_text_is_given_up_where_confidence_stays_low() -> None:
    model = ToyModel([0, 3, BLOCKS])
    reference = model.whole(IDS)
    sure = [top_probability(reference[place, 3]) for place in range(len(IDS))]
    means = [sum(sure[place - 2 : place + 1]) / 3 for place in range(2, len(IDS))]
    least = sorted(means)[len(means) // 4]
    steps = early(model, [3], [2.0], give_up=least)
    for place, token in enumerate(IDS):
        assert not steps.is_hopeless, place
        found = steps.step(token)
        np.testing.assert_allclose(found, reference[place, BLOCKS], rtol=1e-9)
        if steps.is_hopeless:
            break
    assert place == 2 + next(i for i, mean in enumerate(means) if mean < least)
