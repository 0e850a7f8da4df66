"""Candidates by what the model gave, and the trees grown from them."""

from __future__ import annotations

import numpy as np
import pytest
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.kinds.recycling import CANDIDATES, Recycling, Successors, top_candidates
from compressor_runtime.speculation.tree import Room

CHOOSER = Sampler(np.random.default_rng(0), 0.0, 0, 1.0)


@pytest.mark.parametrize("size", [3, 8, 300, 640, 5000])
def test_the_largest_logits_in_order(size: int) -> None:
    logits = np.random.default_rng(size).normal(size=(5, size)).astype(np.float32)
    logits[0, ::2] = -np.inf
    count = min(CANDIDATES, size)
    wanted = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    found = top_candidates(logits, count)
    assert np.array_equal(np.take_along_axis(logits, found, 1), np.take_along_axis(logits, wanted, 1))
    assert np.array_equal(found[1:], wanted[1:])
    assert all(len(set(row)) == count for row in found.tolist())


def test_tokens_remember_their_latest_candidates_in_two_megabytes() -> None:
    successors = Successors(200_000)
    assert sum(array.nbytes for array in vars(successors).values()) < 2_000_000
    rows = np.array([[*range(CANDIDATES)]], np.int32)
    successors.write(np.array([150_000]), rows)
    successors.write(np.array([7, 7]), np.concatenate([rows + 1, rows + 2]))
    assert successors.of(150_000) == [*range(CANDIDATES)] and successors.of(7)[0] == 2
    successors.write_text(np.array([7, 9, 11, 9, 12]))
    assert successors.of(7)[0] == 2 and successors.of(9) == [12] and successors.of(12) == successors.of(-1) == []


def test_a_tree_has_the_likeliest_nodes() -> None:
    successors = Successors(10)
    chances = [0.5, 0.3, 0.1, 0.05, 0.01, 0.01, 0.01, 0.01]
    acceptance = Acceptance(lambda source: chances[source[1]])  # type: ignore[index]
    draft = Recycling(successors, acceptance)
    successors.write(
        np.arange(10), np.array([[(token + 1 + rank) % 10 for rank in range(8)] for token in range(10)], np.int32)
    )
    assert len(draft.propose(Room(9, 4, 0.02, CHOOSER))) == 0  # no text yet
    draft.extend([3])
    tree = draft.propose(Room(9, 2, 0.02, CHOOSER))
    products = [a * b for a in chances for b in [1.0, *chances]]
    assert sorted(tree.chances, reverse=True) == pytest.approx(sorted(products, reverse=True)[:9])
    assert tree.tokens[0] == 4 and tree.children(-1)[5] and tree.children(0)[5]
    draft.extend([8])
    draft.observe(np.array([8]), np.array([[0, 1, 2, 3, 4, 5, 6, 7, 9, 8.0]], np.float32))
    assert draft.propose(Room(1, 2, 0.02, CHOOSER)).tokens == [8]
