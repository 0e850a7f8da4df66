"""Draft from the likeliest successors that the model itself gave to each token, when it last read it.

Token recycling (arXiv:2408.08696): a matrix of candidates by token, written with every verification, accepted or not.
The paper's tree has one shape for all; here each tree has the nodes that are likeliest by what was accepted so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.kinds.kind import Kind, Shared
from compressor_runtime.speculation.tree import Room, Tree

CANDIDATES = 8
_MOST_BYTES = 2_000_000
_BLOCK = 64  # logits of which one maximum is taken first
_WATCHED = 3  # first tokens that are drafted however unlikely: what becomes of them is how estimates rise again
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
        tree, ranks = Tree(), {first: self._ranks(first) for first in (True, False)}
        queue: list[tuple[float, int, int, int]] = []  # -chance, parent, depth, place among the parent's candidates
        candidates = {-1: self._successors.of(self._last)}  # of each node

        def push(parent: int, depth: int, place: int) -> None:
            """Enter a node's next candidate; the others wait until it was taken, since they are less likely."""
            while place < len(ranks[depth == 1]):
                chance, rank = ranks[depth == 1][place]
                if rank < len(candidates[parent]):
                    chance *= tree.chance(parent)
                    if chance >= room.least or (parent < 0 and place < _WATCHED):
                        heapq.heappush(queue, (-chance, parent, depth, place))
                    return
                place += 1

        push(-1, 1, 0)
        while queue and len(tree) < room.nodes:
            chance, parent, depth, place = heapq.heappop(queue)
            rank = ranks[depth == 1][place][1]
            token = candidates[parent][rank]
            node = tree.add(parent, token, -chance, (self.name, rank, depth == 1))
            push(parent, depth, place + 1)
            if depth < room.depth:
                candidates[node] = self._successors.of(token)
                push(node, depth + 1, 0)
        return tree

    def _ranks(self, first: bool) -> list[tuple[float, int]]:
        """Return probability and rank of candidates, the likeliest first."""
        found = [(self._acceptance.chance((self.name, rank, first)), rank) for rank in range(CANDIDATES)]
        return sorted(found, reverse=True)


def recycling_prior(rank: int) -> float:
    """Return how often a candidate of a rank is right, before any was seen."""
    return _RANK_PRIOR[rank]


def top_candidates(logits: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Return the tokens [T, count] with the largest logits [T, V], the largest first.

    The largest ``count`` lie in the ``count`` blocks with the largest maxima, and maxima of blocks take one fast pass,
    where a partition of all takes ten times as long.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if blocks <= count:
        ids = np.broadcast_to(np.arange(size), (rows, size))
    else:
        whole = logits[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK).max(axis=2)
        best = np.argpartition(whole, blocks - count, axis=1)[:, blocks - count :]
        inside = (best[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(rows, -1)
        rest = np.broadcast_to(np.arange(blocks * _BLOCK, size), (rows, size - blocks * _BLOCK))
        ids = np.concatenate([inside, rest], axis=1)
    values = np.take_along_axis(logits, ids, axis=1)
    order = np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]
    best_values = np.take_along_axis(values, order, axis=1)
    order = np.take_along_axis(order, np.argsort(-best_values, axis=1, kind="stable"), axis=1)
    return np.take_along_axis(ids, order, axis=1).astype(np.int32)


def _make_recycling(shared: Shared, _session: Any, _slot: int) -> Recycling:
    if Recycling.name not in shared.kept:
        shared.kept[Recycling.name] = Successors(shared.vocab_size)
    return Recycling(shared.kept[Recycling.name], shared.acceptance)


def _of_candidate(source: Hashable) -> float:
    entry: Any = source
    return recycling_prior(entry[1])


RECYCLE = Kind(Recycling.name, _make_recycling, _of_candidate)
"""Drafts from successors that the model gave before."""
