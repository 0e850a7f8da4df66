"""Hold drafted continuations of a text as a tree, and say what a draft is."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.generation import Sampler


@dataclass
class Tree:
    """Continuations of a text that share their beginnings; node -1 is the last token that the text has.

    Attributes:
        tokens: token of each node.
        parents: node before each, -1 or a smaller index.
        chances: estimated probability that the node is accepted, with all nodes before it; never above its parent's.
        sources: what each estimate rests on, a key of :class:`~compressor_runtime.speculation.acceptance.Acceptance`.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    chances: list[float] = dataclasses.field(default_factory=list)
    sources: list[Hashable] = dataclasses.field(default_factory=list)
    _children: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> dict[int, int]:
        """Return the nodes behind a node, by token."""
        return self._children.get(node, {})

    def chance(self, node: int) -> float:
        """Return the estimated probability that a node is accepted; the text's last token, -1, is certain."""
        return 1.0 if node < 0 else self.chances[node]

    def add(self, parent: int, token: int, chance: float, source: Hashable) -> int:
        """Add a token behind a node and return its node; one that is there already keeps its better estimate."""
        chance = min(chance, self.chance(parent))
        behind = self._children.setdefault(parent, {})
        node = behind.setdefault(token, len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(chance)
            self.sources.append(source)
        elif chance > self.chances[node]:
            self.chances[node], self.sources[node] = chance, source
        return node

    def merge(self, other: Tree) -> None:
        """Add all nodes of another tree."""
        places = {-1: -1}
        for node, token in enumerate(other.tokens):
            parent = places[other.parents[node]]
            places[node] = self.add(parent, token, other.chances[node], other.sources[node])

    def without(self, tokens: Any) -> Tree:
        """Return the tree without some tokens and all that is behind them."""
        if not any(token in tokens for token in self.tokens):
            return self
        places, left = {-1: -1}, Tree()
        for node, token in enumerate(self.tokens):
            if self.parents[node] in places and token not in tokens:
                parent = places[self.parents[node]]
                places[node] = left.add(parent, token, self.chances[node], self.sources[node])
        return left

    def likeliest(self, count: int) -> Tree:
        """Return the ``count`` nodes that are accepted most probably: with a node, all before it are among them."""
        if count >= len(self):
            return self
        kept = sorted(sorted(range(len(self)), key=lambda node: (-self.chances[node], node))[:count])
        places, left = {-1: -1}, Tree()
        for node in kept:
            parent = places[self.parents[node]]
            places[node] = left.add(parent, self.tokens[node], self.chances[node], self.sources[node])
        return left


@dataclass(frozen=True)
class Room:
    """Limits of a draft.

    Attributes:
        nodes: at most so many tokens.
        depth: at most so many behind one another.
        least: tokens that are accepted less probably than this do not pay for their rows.
        sampler: chooses the text's tokens.  A draft that has a distribution may look at the uniform numbers that the
            next choices will be made with (:meth:`~compressor_runtime.generation.Sampler.ahead`) and choose with them:
            it then agrees with the model as often as one random number allows.
        ends: tokens that end the text, behind which no draft is of use.
    """

    nodes: int
    depth: int
    least: float
    sampler: Sampler
    ends: Container[int] = ()


class Stepper(Protocol):
    """A model that drafts; it may be a part of the model that verifies.

    Texts whose models are equal, and so have equal hashes, are read by one of these in one call.
    """

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """Read a token of each of some texts; return logits [R, N, V] of the N tokens behind each, which may be 0.

        Args:
            tokens: [R], a text's pending token, or one that was drafted.
            ahead: [R], tokens that were read before it in this draft, so that its position is the text's stored length
                plus this.  Its keys and values go there, behind the stored ones, and whatever is verified writes over
                them.
            slots: [R], numbers of the texts in their session, which differ.
        """


@dataclass(frozen=True)
class Wish:
    """A token that a draft would have a model read next.

    Attributes:
        model: that reads it.
        slot, token, ahead: one of each that :meth:`Stepper.step` takes.
        most: tokens that the text may draft.
        chances: of those it has drafted, falling.
        following: probability that the next one is right, given that those before it are.
    """

    model: Stepper
    slot: int
    token: int
    ahead: int
    most: int
    chances: Sequence[float]
    following: float


Walk: TypeAlias = Generator[Wish, "NDArray[np.float32] | None", Tree]
"""A draft that goes on: it is sent logits [N, V] of what follows the token that it wished for, or None where that would
not pay, and returns its tree."""


class Draft(Protocol):
    """Guess how one text goes on.

    Attributes:
        name: the kind's.
        reads_logits: it looks at what the model computes.
    """

    name: str
    reads_logits: bool

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that the text has gained: the prompt, then what was generated."""

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Look at what the model computed: tokens [T], accepted or not, and logits [T, V] of what comes after each."""

    def propose(self, room: Room) -> Tree | Walk:
        """Return a tree of continuations, empty without a guess, or a walk that asks a model for them."""
