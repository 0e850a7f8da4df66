"""Draft what followed earlier where the text had the same last tokens.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) and CopySpec
(arXiv:2502.08923), with an index in place of a search, and with several continuations as a tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.kinds.kind import Kind
from compressor_runtime.speculation.tree import Room, Tree

LONGEST, SHORTEST = 8, 2
"""Tokens that must agree, at most and at least."""
PLACES, BRANCHES = 16, 3
"""Latest places that are compared, and continuations that a draft has at most."""
_PRIOR = (0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)


class Lookup:
    """Index of a text: where its last two tokens stood before, the latest places first.

    An appended token takes one entry of a dictionary, 0.3 us, and a draft at most 16 comparisons, however long the text
    is: places with the same two tokens are linked, as in compressors of the family LZ77.

    Args:
        acceptance: estimates by the n of the match, and by how many other continuations were preferred.
    """

    name = "lookup"
    reads_logits = False

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._ids: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair of tokens -> index of what followed it last
        self._earlier: list[int] = []  # index -> what followed the same pair before; -1 where nothing did

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        ids, latest, earlier = self._ids, self._latest, self._earlier
        for token in tokens:
            end = len(ids)
            place = -1
            if end >= SHORTEST:
                pair = (ids[-2], ids[-1])
                place = latest.get(pair, -1)
                latest[pair] = end
            earlier.append(place)
            ids.append(token)

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Do nothing: only the text counts."""

    def matches(self) -> list[tuple[int, int]]:
        """Return where the text went on after its last tokens stood there before, among the latest 16 places.

        Returns:
            (n, index of the token that followed): the longest match first, of equal ones the latest, one for each
            token that followed.
        """
        ids, found = self._ids, list[tuple[int, int]]()
        place = self._latest.get((ids[-2], ids[-1]), -1) if len(ids) >= SHORTEST else -1
        while place >= 0 and len(found) < PLACES:
            n, most = SHORTEST, min(LONGEST, place)
            while n < most and ids[place - n - 1] == ids[-n - 1]:
                n += 1
            found.append((n, place))
            if n == LONGEST:
                break  # none is better, and the others would be tried after it
            place = self._earlier[place]
        best: dict[int, tuple[int, int]] = {}
        for n, place in sorted(found, key=lambda match: (-match[0], -match[1])):
            best.setdefault(ids[place], (n, place))
        return list(best.values())

    def propose(self, room: Room) -> Tree:
        """Return the continuations of the best matches, each as far as it is likely enough."""
        tree = Tree()
        for rank, (n, place) in enumerate(self.matches()[:BRANCHES]):
            node = -1
            for offset in range(room.depth):
                source: Hashable = (self.name, min(n + offset, LONGEST), 0 if offset else rank)
                chance = tree.chance(node) * self._acceptance.chance(source)
                if (offset and chance < room.least) or len(tree) == room.nodes:
                    break  # a first token may be unlikely: what becomes of it is how estimates rise again
                node = tree.add(node, self._at(place + offset, place), chance, source)
        return tree

    def _at(self, index: int, place: int) -> int:
        """Return the token at an index; behind the text, of its repetition from ``place`` on."""
        count = len(self._ids)
        return self._ids[index if index < count else place + (index - place) % (count - place)]


def lookup_prior(n: int, rank: int) -> float:
    """Return how often a match of ``n`` tokens is right, before any was seen, if ``rank`` others were preferred."""
    return _PRIOR[n] if rank == 0 else (1 - _PRIOR[n]) / (2 * rank)


def _of_match(source: Hashable) -> float:
    entry: Any = source
    return lookup_prior(entry[1], entry[2])


LOOKUP = Kind(Lookup.name, lambda shared, _session, _slot: Lookup(shared.acceptance), _of_match)
"""Drafts from the text itself."""
