"""Draft a chain of tokens with a model, one behind another, as long as a further one is expected to pay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.pace import Pace
from compressor_runtime.speculation.tree import Room, Tree

LEVELS = 8
"""Steps of confidence, of which each has an estimate of its own."""
_FIRST_GUESS = 0.8  # how often guesses are right before any was seen: high, so that a draft is tried
_RECENT = 64  # guesses that the mean over all levels mostly rests on


class Stepper(Protocol):
    """A model that drafts for one text; it may be a part of the model that verifies."""

    def step(self, token: int, ahead: int) -> NDArray[np.float32]:
        """Read a token and return logits [V] of what comes after it.

        Args:
            token: the text's pending token, or one that was drafted.
            ahead: tokens that were read before it in this draft, so that its position is the text's stored length plus
                this.  Its keys and values go there, behind the stored ones, and whatever is verified writes over them.
        """


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
        stepper: the model.
        pace: times, which say whether a further token pays.
        acceptance: estimates by confidence.
        mean: estimate of the next guess, before its confidence is known; texts share it.
    """

    reads_logits = False

    def __init__(self, name: str, stepper: Stepper, pace: Pace, acceptance: Acceptance, mean: Mean) -> None:
        self.name = name
        self._stepper, self._pace, self._acceptance, self._mean = stepper, pace, acceptance, mean
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

    def propose(self, room: Room) -> Tree:
        """Return a chain, up to the first token that ends the text."""
        tree, token, most = Tree(), self._last, min(room.nodes, room.depth)
        numbers = room.sampler.ahead(most) if room.sampler.temperature else np.zeros(most)
        while len(tree) < most and room.goes_on(tree.chances, self._mean.value):
            begin, node = self._pace.clock(), len(tree) - 1
            logits = self._stepper.step(token, node + 1)
            token = room.sampler.guess(logits, float(numbers[node + 1]))
            source = (self.name, confidence(logits, token))
            tree.add(node, token, tree.chance(node) * self._acceptance.chance(source), source)
            self._pace.note_draft(self.name, self._pace.clock() - begin)
            if token in room.ends:
                break
        self._guessed = list(tree.tokens)
        return tree


def confidence(logits: NDArray[np.float32], token: int) -> int:
    """Return the step, 0 to 7, of the probability of a token from logits [V], at temperature 1."""
    top = logits.max()
    share = float(np.exp(logits[token] - top) / np.exp(logits - top).sum())
    return min(int(share * LEVELS), LEVELS - 1)


def chain_prior(source: Hashable) -> float:
    """Return how often a guess of a confidence is right, before any was seen: as often as it says of itself."""
    entry: Any = source
    return float((entry[1] + 0.5) / LEVELS)
