"""Draft chains of tokens with a model, of several texts in lockstep, as long as further ones are expected to pay."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.pace import Pace
from compressor_runtime.speculation.tree import Room, Stepper, Tree, Walk, Wish

LEVELS = 8
"""Steps of confidence, of which each has an estimate of its own."""
_FIRST_GUESS = 0.8  # how often guesses are right before any was seen: high, so that a draft is tried
_RECENT = 64  # guesses that the mean over all levels mostly rests on


@dataclass
class Mean:
    """A running mean of how often guesses are right, over all levels of confidence and all texts.

    Attributes:
        value: the mean.
        count: guesses that it rests on.
    """

    value: float = _FIRST_GUESS
    count: int = 0

    def add(self, right: bool) -> None:
        """Count a guess."""
        self.value += (right - self.value) / min(self.count + 3, _RECENT)
        self.count += 1


class Chain:
    """Draft one text with a model.

    Each token is chosen as the text's own next one will be, with the same random number: where both models agree, so do
    their choices.  How often a guess is right is estimated by the draft's own probability of it.

    Args:
        name: of the kind.
        model: that drafts.
        slot: number of the text in its session.
        acceptance: estimates by confidence.
        mean: estimate of the next guess, before its confidence is known; texts share it.
    """

    reads_logits = False

    def __init__(self, name: str, model: Stepper, slot: int, acceptance: Acceptance, mean: Mean) -> None:
        self.name = name
        self._model, self._slot, self._acceptance, self._mean = model, slot, acceptance, mean
        self._last = -1
        self._guessed: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and learn from how far the last guesses were right."""
        for guess, token in zip(self._guessed, tokens, strict=False):
            self._mean.add(guess == token)
            if guess != token:
                break
        self._guessed = []
        self._last = int(tokens[-1]) if len(tokens) else self._last

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Do nothing: only the text counts."""

    def propose(self, room: Room) -> Walk:
        """Ask for one token behind another, up to the first that ends the text; return the chain."""
        tree, token, most = Tree(), self._last, min(room.nodes, room.depth)
        numbers = room.sampler.ahead(most) if room.sampler.temperature else np.zeros(most)
        while (ahead := len(tree)) < most:
            logits = yield Wish(self._model, self._slot, token, ahead, most, tree.chances, self._mean.value)
            if logits is None:
                break
            token = room.sampler.guess(logits[0], float(numbers[ahead]))
            source = (self.name, confidence(logits[0], token))
            tree.add(ahead - 1, token, tree.chance(ahead - 1) * self._acceptance.chance(source), source)
            if token in room.ends:
                break
        self._guessed = list(tree.tokens)
        return tree


def drafted_together(
    name: str, drafts: Mapping[int, Tree | Walk], pace: Pace, sequences: int, room: int
) -> dict[int, Tree]:
    """Return the trees of the drafts of one kind, by their texts.

    Those that ask the same model go on in lockstep: it reads a token of each in one call, as long as that is expected
    to pay.

    Args:
        name: of the kind.
        drafts: by the places of their texts.
        sequences: texts that wait for these drafts.
        room: drafted tokens that may be verified, of all texts together.
    """
    trees = {place: draft for place, draft in drafts.items() if isinstance(draft, Tree)}
    walks = {place: draft for place, draft in drafts.items() if not isinstance(draft, Tree)}
    wishes: dict[int, Wish] = {}

    def advance(place: int, logits: NDArray[np.float32] | None) -> None:
        try:
            wishes[place] = walks[place].send(logits)
        except StopIteration as end:
            wishes.pop(place, None)
            trees[place] = end.value

    for place in walks:
        advance(place, None)
    while wishes:
        model = next(iter(wishes.values())).model
        places = [place for place, wish in wishes.items() if wish.model == model]
        going = pace.going(name, sequences, room, {place: wishes[place] for place in places})
        for place in places:
            if place not in going:
                advance(place, None)
        if going:
            begin = pace.clock()
            logits = model.step(*zip(*((wish.token, wish.ahead, wish.slot) for wish in going.values()), strict=True))
            for place, row in zip(going, logits, strict=True):
                advance(place, row)
            if count := logits.shape[1]:
                pace.note_draft(name, (pace.clock() - begin) / count, len(going))
    return trees


def confidence(logits: NDArray[np.float32], token: int) -> int:
    """Return the step, 0 to 7, of the probability of a token from logits [V], at temperature 1."""
    top = logits.max()
    share = float(np.exp(logits[token] - top) / np.exp(logits - top).sum())
    return min(int(share * LEVELS), LEVELS - 1)


def chain_prior(source: Hashable) -> float:
    """Return how often a guess of a confidence is right, before any was seen: as often as it says of itself."""
    entry: Any = source
    return float((entry[1] + 0.5) / LEVELS)
