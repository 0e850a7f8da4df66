"""Trees of tokens: merged where they begin alike, cut where they are unlikely."""

from __future__ import annotations

import numpy as np
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.tree import Tree
from hypothesis import given
from hypothesis import strategies as st

CHAINS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.floats(0, 1)), max_size=8)


def grown(chains: list[tuple[list[int], float]]) -> Tree:
    tree = Tree()
    for tokens, chance in chains:
        node = -1
        for token in tokens:
            node = tree.add(node, token, tree.chance(node) * chance, ("chain", chance, 0))
    return tree


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(tree.tokens):
        assert -1 <= tree.parents[node] < node and tree.children(tree.parents[node])[token] == node
        found.append((*(found[tree.parents[node]] if tree.parents[node] >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return dict(zip(found, tree.chances, strict=True))


@given(CHAINS, st.integers(0, 12), st.sets(st.integers(0, 3)))
def test_a_tree_has_each_beginning_once(chains: list[tuple[list[int], float]], count: int, banned: set[int]) -> None:
    tree = grown(chains)
    every = paths(tree)
    assert set(every) == {tuple(tokens[: end + 1]) for tokens, _ in chains for end in range(len(tokens))}
    assert all(chance <= every.get(path[:-1], 1.0) for path, chance in every.items())
    kept = paths(tree.likeliest(count))
    assert sorted(kept.values()) == sorted(every.values())[len(every) - min(count, len(every)) :]
    assert all(path[:-1] in kept or len(path) == 1 for path in kept)
    assert paths(tree.without(banned)) == {path: every[path] for path in every if not banned & {*path}}
    both = Tree()
    both.merge(tree)
    both.merge(tree.likeliest(count))
    assert paths(both) == every


def test_estimates_follow_what_came() -> None:
    acceptance, random = Acceptance(lambda _: 0.5), np.random.default_rng(0)
    tree = grown([([1, 2], 0.9), ([3], 0.1)])
    for _ in range(600):
        acceptance.learn(tree, [1, 2, 5] if random.random() < 0.8 else [4])
    assert abs(acceptance.chance(("chain", 0.9, 0)) - 0.9) < 0.1  # 0.8 of the first, all of the second behind it
    assert acceptance.chance(("chain", 0.1, 0)) < 0.01
    assert acceptance.chance("new") == 0.5
