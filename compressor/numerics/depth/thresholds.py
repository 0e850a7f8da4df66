"""Choose from which confidence on an exit speaks: the cheapest thresholds that keep a stated agreement.

A token leaves at the first exit whose confidence reaches the exit's threshold, and else runs all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = 2.0
"""A threshold that no probability reaches."""
_LEVELS = 64


@dataclass(frozen=True)
class Outcome:
    """Result of thresholds on measured tokens.

    Attributes:
        agreement: share of all tokens that are those of the whole model.
        leaving: share of all tokens that leave at each exit.
        blocks: mean number of blocks that a token runs.
        heads: mean number of heads that a token computes.
    """

    agreement: float
    leaving: tuple[float, ...]
    blocks: float
    heads: float


def outcome(
    confidence: Tensor, agrees: Tensor, exits: Sequence[int], blocks: int, thresholds: Sequence[float]
) -> Outcome:
    """Return what thresholds do.

    Args:
        confidence: float [exits, tokens], of each token at each exit.
        agrees: bool [exits, tokens], whether the likeliest token there is the whole model's.
        exits: blocks that run in front of each.
        blocks: of the whole model.
    """
    left = torch.ones(confidence.shape[1], dtype=torch.bool)
    right, ran, heads, leaving = 0, 0, 0, list[float]()
    for place, count in enumerate(exits):
        if thresholds[place] <= 1:
            heads += int(left.sum())
        goes = left & (confidence[place] >= thresholds[place])
        right += int((goes & agrees[place]).sum())
        ran += count * int(goes.sum())
        leaving.append(int(goes.sum()) / len(left))
        left = left & ~goes
    stay, tokens = int(left.sum()), len(left)
    return Outcome((right + stay) / tokens, tuple(leaving), (ran + blocks * stay) / tokens, (heads + stay) / tokens)


def choose_thresholds(
    confidence: Tensor, agrees: Tensor, exits: Sequence[int], blocks: int, agreement: float
) -> tuple[float, ...]:
    """Return thresholds that let tokens run few blocks while their agreement with the whole model stays.

    Each exit's begins above all confidences.  The one whose next lower level saves the most blocks for each token that
    it gets wrong goes down, as long as the agreement stays.  With one exit this is the cheapest there is: the lowest
    level at which the agreement holds.

    Args:
        agreement: the least share of all tokens that are to be those of the whole model.
        others: as of :func:`outcome`.
    Returns:
        A threshold for each exit; :data:`NEVER` for one that keeps none of its tokens right enough.
    """
    levels = [_levels(row) for row in confidence]
    places = [0] * len(levels)  # 0: never
    best = [NEVER] * len(levels)

    def at(chosen: Sequence[int]) -> tuple[float, ...]:
        return tuple(NEVER if not n else levels[place][n - 1] for place, n in enumerate(chosen))

    now = outcome(confidence, agrees, exits, blocks, at(places))
    while True:
        found: tuple[float, list[int], Outcome] | None = None
        for place, its in enumerate(levels):
            for step in range(1, len(its) - places[place] + 1):
                tried = [*places]
                tried[place] += step
                then = outcome(confidence, agrees, exits, blocks, at(tried))
                if then.agreement < agreement:
                    break
                if then.blocks < now.blocks:
                    gain = (now.blocks - then.blocks) / max(now.agreement - then.agreement, 1e-9)
                    if found is None or gain > found[0]:
                        found = (gain, tried, then)
                    break
        if found is None:
            return tuple(best)
        _, places, now = found
        best = list(at(places))


def _levels(confidence: Tensor) -> list[float]:
    """Return the confidences to choose among, falling: quantiles at even distances of all that there are."""
    ordered = torch.sort(confidence.double(), descending=True).values
    picks = torch.linspace(0, len(ordered) - 1, min(_LEVELS, len(ordered))).round().long()
    return list(dict.fromkeys(ordered[picks].tolist()))


def choose_giving_up(confidence: Tensor, right: Tensor, window: int, hopeless: float) -> float:
    """Return the mean confidence below which a text is given up.

    It is the highest below which, of all windows of so many tokens in a row, the share of right tokens is at most
    ``hopeless``; 0 where there is none.

    Args:
        confidence: float [texts, tokens], at the first exit.
        right: bool [texts, tokens], whether the whole model's likeliest token is the text's.
    """
    means, shares = (x.double().unfold(1, window, 1).mean(2).flatten() for x in (confidence, right))
    order = torch.argsort(means, stable=True)
    means, below = means[order], torch.cumsum(shares[order], 0) / torch.arange(1, len(order) + 1)
    held = (below[:-1] <= hopeless) & (means[1:] > means[:-1])  # all windows below a mean: not a part of equal ones
    places = torch.nonzero(held).flatten()
    return float(means[int(places[-1]) + 1]) if len(places) else 0.0
