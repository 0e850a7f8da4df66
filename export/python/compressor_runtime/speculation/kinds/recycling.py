"""Draft from the likeliest successors that the model itself gave to each token, when it last read it.

Token recycling (arXiv:2408.08696): a matrix of candidates by token, written with every verification, accepted or not.
The paper's tree has one shape for all; here each tree has the nodes that are likeliest by what was accepted so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.kinds.candidates import best_first, top_candidates
from compressor_runtime.speculation.kinds.kind import Kind, Shared
from compressor_runtime.speculation.tree import Room, Tree

CANDIDATES = 8
_MOST_BYTES = 2_000_000
_RANK_PRIOR = (0.4, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)


class Successors:
    """Candidates for what comes after each token, in less than 2 MB: of a larger vocabulary, tokens share rows.

    Args:
        vocab_size: tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        rows = min(vocab_size, _MOST_BYTES // (4 * (CANDIDATES + 1)))
        self._owners = np.full(rows, -1, np.int32)
        self._candidates = np.full((rows, CANDIDATES), -1, np.int32)

    def write(self, tokens: NDArray[np.int64], candidates: NDArray[np.int32]) -> None:
        """Write the candidates [T, 8] of tokens [T], the likeliest first."""
        rows = tokens % len(self._owners)
        self._owners[rows] = tokens
        self._candidates[rows, : candidates.shape[1]] = candidates

    def write_text(self, tokens: NDArray[np.int64]) -> None:
        """Write what follows what in a text, for tokens that have no candidates."""
        before, after = tokens[:-1], tokens[1:]
        rows = before % len(self._owners)
        new = self._owners[rows] != before
        self._candidates[rows[new]] = -1
        self._candidates[rows[new], 0] = after[new]
        self._owners[rows[new]] = before[new]

    def of(self, token: int) -> list[int]:
        """Return the candidates after a token, the likeliest first."""
        row = token % len(self._owners)
        if self._owners[row] != token:
            return []
        return [candidate for candidate in self._candidates[row].tolist() if candidate >= 0]


class Recycling:
    """Draft one text from a matrix of successors, which texts may share.

    Args:
        successors: the matrix.
        acceptance: estimates by the rank of a candidate, and by whether it is the first token of a draft.
    """

    name = "recycle"
    reads_logits = True

    def __init__(self, successors: Successors, acceptance: Acceptance) -> None:
        self._successors, self._acceptance = successors, acceptance
        self._last = -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if len(tokens) > 1:
            self._successors.write_text(np.asarray(tokens, np.int64))
        self._last = int(tokens[-1]) if len(tokens) else self._last

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Remember the likeliest tokens [T, 8] by logits [T, V]."""
        self._successors.write(tokens, top_candidates(logits, min(CANDIDATES, logits.shape[1])))

    def propose(self, room: Room) -> Tree:
        """Return the tree of the likeliest nodes, by the ranks of their candidates."""
        return best_first(room, self._acceptance, _sources, lambda token, _: self._successors.of(token), self._last)


def recycling_prior(rank: int) -> float:
    """Return how often a candidate of a rank is right, before any was seen."""
    return _RANK_PRIOR[rank]


def _make_recycling(shared: Shared, _session: Any, _slot: int) -> Recycling:
    if Recycling.name not in shared.kept:
        shared.kept[Recycling.name] = Successors(shared.vocab_size)
    return Recycling(shared.kept[Recycling.name], shared.acceptance)


def _of_candidate(source: Hashable) -> float:
    entry: Any = source
    return recycling_prior(entry[1])


_SOURCES = {first: [(Recycling.name, rank, first) for rank in range(CANDIDATES)] for first in (True, False)}


def _sources(depth: int) -> Sequence[Hashable]:
    """Return what guesses rest on: their rank, and whether they are the first of a draft."""
    return _SOURCES[depth == 1]


RECYCLE = Kind(Recycling.name, _make_recycling, _of_candidate)
"""Drafts from successors that the model gave before."""
