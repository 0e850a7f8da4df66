"""Matches in a text against a search through all of it."""

from __future__ import annotations

import numpy as np
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.kinds.lookup import BRANCHES, LONGEST, PLACES, SHORTEST, Lookup, lookup_prior
from compressor_runtime.speculation.tree import Room
from hypothesis import given, settings
from hypothesis import strategies as st

CHOOSER = Sampler(np.random.default_rng(0), 0.0, 0, 1.0)


def searched(text: list[int]) -> list[tuple[int, int]]:
    """Return (n, index of the token that followed) of the latest places with the last two tokens, best first."""
    places: list[tuple[int, int]] = []
    for end in range(len(text) - 1, SHORTEST - 1, -1):
        matching = [n for n in range(SHORTEST, min(LONGEST, end) + 1) if text[end - n : end] == text[-n:]]
        if matching:
            places.append((matching[-1], end))
        if places and places[-1][0] == LONGEST:
            break
    found: dict[int, tuple[int, int]] = {}
    for n, end in sorted(places[:PLACES], key=lambda match: (-match[0], -match[1])):
        found.setdefault(text[end], (n, end))
    return list(found.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9))
def test_matches_are_those_of_a_search(text: list[int], piece: int) -> None:
    lookup = Lookup(Acceptance(lambda _: 0.5))
    for start in range(0, len(text), piece):
        lookup.extend(text[start : start + piece])
    assert lookup.matches() == searched(text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=50), st.integers(0, 12), st.integers(1, 8))
def test_drafts_go_on_as_the_text_did(text: list[int], nodes: int, depth: int) -> None:
    lookup = Lookup(Acceptance(lambda _: 0.9))
    lookup.extend(text)
    tree = lookup.propose(Room(nodes, depth, 0.02, CHOOSER))
    assert len(tree) <= nodes
    branches = {tuple((text * 1)[place:] + text[place:] * depth)[:depth] for _, place in searched(text)[:BRANCHES]}
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        tokens = tuple(tree.tokens[index] for index in path)
        assert len(tokens) <= depth and any(branch[: len(tokens)] == tokens for branch in branches)
        chances = [tree.chances[index] for index in path]
        assert chances == sorted(chances, reverse=True)


def test_a_period_goes_on_and_estimates_decide_how_far() -> None:
    lookup = Lookup(Acceptance(lambda source: lookup_prior(*source[1:])))  # type: ignore[index]
    lookup.extend([9, 1, 2, 3, 1, 2, 3])
    tree = lookup.propose(Room(12, 12, 0.02, CHOOSER))
    assert tree.tokens[:6] == [1, 2, 3, 1, 2, 3]
    doubtful = Acceptance(lambda _: 0.1)
    lookup = Lookup(doubtful)
    lookup.extend([9, 1, 2, 3, 1, 2, 3])
    assert len(lookup.propose(Room(12, 12, 0.02, CHOOSER))) == 1  # 0.1, then 0.01
