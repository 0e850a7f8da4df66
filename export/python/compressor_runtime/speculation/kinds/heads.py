"""Draft with the model's own heads: what they say of the last hidden state and of the token chosen behind it.

Medusa (arXiv:2401.10774) takes a tree of the heads' likeliest tokens, of one shape; here the tree has the nodes that
are likeliest by what was accepted so far.  Head i gives the candidates of depth i, the same behind every node.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.hidden import HEADS, Hidden
from compressor_runtime.speculation.kinds.candidates import best_first, top_candidates
from compressor_runtime.speculation.kinds.kind import VERIFY, Kind, Shared
from compressor_runtime.speculation.kinds.recycling import CANDIDATES, recycling_prior
from compressor_runtime.speculation.tree import Room, Tree, Walk, Wish


@dataclass(frozen=True)
class _LastStates:
    """Read the tokens behind the last hidden states of a session."""

    hidden: Hidden

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """Return logits [R, heads, V] of what comes behind each text's last token; all of ``ahead`` are 0.

        None, [R, 0, 0], where a state is missing: to ask for it lets the next step keep it.
        """
        states = [self.hidden.of(slot) for slot in slots]
        if any(state is None for state in states):
            return np.zeros((len(slots), 0, 0), np.float32)
        return self.hidden.heads(states, tokens)


class Heads:
    """Draft one text with heads.

    Behind a prompt, and behind plain steps, no hidden state is kept; the next step then keeps it.

    Args:
        hidden: of the session.
        slot: the text's sequence.
        acceptance: estimates by head and rank.
    """

    name = HEADS
    reads_logits = False

    def __init__(self, hidden: Hidden, slot: int, acceptance: Acceptance) -> None:
        self._hidden, self._slot, self._acceptance = hidden, slot, acceptance
        self._last = -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._last = int(tokens[-1]) if len(tokens) else self._last

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Do nothing: hidden states are the session's."""

    def propose(self, room: Room) -> Walk:
        """Ask the heads; return the tree of the likeliest nodes, by head and rank."""
        following = self._acceptance.chance(_head_sources(1)[0])
        logits = yield Wish(_LastStates(self._hidden), self._slot, self._last, 0, room.nodes, (), following)
        if logits is None or not len(logits):
            return Tree()
        found = top_candidates(logits, min(CANDIDATES, logits.shape[1])).tolist()

        def candidates(_token: int, depth: int) -> list[int]:
            return found[depth - 1] if depth <= len(found) else []

        return best_first(room, self._acceptance, _head_sources, candidates, self._last)


@cache
def _head_sources(depth: int) -> Sequence[Hashable]:
    """Return what guesses rest on: head and rank."""
    return [(HEADS, depth, rank) for rank in range(CANDIDATES)]


def _make(shared: Shared, session: Any, slot: int) -> Heads:
    return Heads(session.hidden, slot, shared.acceptance)


def heads_prior(source: Hashable) -> float:
    """Return how often a candidate of a rank is right, before any was seen."""
    entry: Any = source
    return recycling_prior(entry[2])


HEADS_KIND = Kind(HEADS, _make, heads_prior, needs=(VERIFY, HEADS))
"""Drafts from heads that the pass `draft_heads` has trained."""
