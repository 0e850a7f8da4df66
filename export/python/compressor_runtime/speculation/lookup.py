"""Draft what followed earlier where the text had the same last tokens.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) and CopySpec
(arXiv:2502.08923), with an index in place of a search, and with several continuations as a tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.tree import Room, Tree

LONGEST, SHORTEST, BRANCHES = 8, 2, 3
"""Tokens that must agree, at most and at least, and continuations of a place that are remembered."""
_PRIOR = (0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)


class Lookup:
    """Index of a text: for each n-gram of 2 to 8 tokens, where it was last followed by each of up to three tokens.

    An appended token takes seven entries of a dictionary, some 1.5 KB, and a draft at most seven look-ups, however long
    the text is.

    Args:
        acceptance: estimates by the n of the match, and by how many other continuations were preferred.
    """

    name = "lookup"
    reads_logits = False

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}  # n-gram -> indices of what followed, latest first

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        ids, places = self._ids, self._places
        for token in tokens:
            end = len(ids)
            ids.append(int(token))
            before = tuple(ids[max(0, end - LONGEST) : end])
            for n in range(SHORTEST, len(before) + 1):
                gram = before[-n:]
                known = places.get(gram)
                if known is None:  # mostly so
                    places[gram] = (end,)
                else:
                    others = [place for place in known if ids[place] != token]
                    places[gram] = (end, *others[: BRANCHES - 1])

    def observe(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
        """Do nothing: only the text counts."""

    def matches(self) -> list[tuple[int, int]]:
        """Return where the text went on after its last tokens stood there before.

        Returns:
            (n, index of the token that followed): the longest match first, of equal ones the latest, one for each
            token that followed.
        """
        found: dict[int, tuple[int, int]] = {}
        for n in range(min(LONGEST, len(self._ids)), SHORTEST - 1, -1):
            for place in self._places.get(tuple(self._ids[-n:]), ()):
                found.setdefault(self._ids[place], (n, place))
        return list(found.values())

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
