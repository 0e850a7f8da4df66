"""Choose the likeliest candidates of logits, and grow trees of them, the likeliest node first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.tree import Room, Tree

_BLOCK = 64  # logits of which one maximum is taken first
_LARGE_VOCAB = 8192  # from here on
_WATCHED = 3  # first tokens that are drafted however unlikely: what becomes of them is how estimates rise again


def best_first(
    room: Room,
    acceptance: Acceptance,
    sources: Callable[[int], Sequence[Hashable]],
    candidates: Callable[[int, int], Sequence[int]],
    last: int,
) -> Tree:
    """Return the tree of the nodes that are accepted most probably, with the first tokens beside them that are watched.

    Args:
        room: limits.
        acceptance: estimates by sources.
        sources: depth, from 1 -> what a guess of each rank rests on.
        candidates: (token, depth) -> what may follow a token, at that depth, by rank; may be fewer.
        last: the last token that the text has.
    """
    tree, by_depth = Tree(), dict[int, list[tuple[float, int]]]()
    queue: list[tuple[float, int, int, int]] = []  # -chance, parent, depth, place among the parent's candidates
    behind = {-1: candidates(last, 1)}  # of each node

    def ranks(depth: int) -> list[tuple[float, int]]:
        """Return probability and rank of candidates, the likeliest first."""
        if depth not in by_depth:
            found = [(acceptance.chance(source), rank) for rank, source in enumerate(sources(depth))]
            by_depth[depth] = sorted(found, reverse=True)
        return by_depth[depth]

    def push(parent: int, depth: int, place: int) -> None:
        """Enter a node's next candidate; the others wait until it was taken, since they are less likely."""
        for chance, rank in ranks(depth)[place:]:
            if rank < len(behind[parent]):
                chance *= tree.chance(parent)
                if chance >= room.least or (parent < 0 and place < _WATCHED):
                    heapq.heappush(queue, (-chance, parent, depth, place))
                return
            place += 1

    push(-1, 1, 0)
    while queue and len(tree) < room.nodes:
        chance, parent, depth, place = heapq.heappop(queue)
        rank = ranks(depth)[place][1]
        token = behind[parent][rank]
        node = tree.add(parent, token, -chance, sources(depth)[rank])
        push(parent, depth, place + 1)
        if depth < room.depth:
            behind[node] = candidates(token, depth + 1)
            push(node, depth + 1, 0)
    return tree


def top_candidates(logits: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Return the tokens [T, count] with the largest logits [T, V], the largest first.

    A pass for each candidate takes a fifth of a partition's time.  Of a large vocabulary they are passes over maxima of
    blocks, as the largest ``count`` lie in the ``count`` blocks with the largest maxima.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if size < _LARGE_VOCAB:
        return _largest(logits, count).astype(np.int32)
    whole = logits[:, : blocks * _BLOCK].reshape(rows, _BLOCK, blocks)  # a block's logits lie ``blocks`` apart
    best = _largest(whole.max(axis=1), count)
    inside = (best[:, None] + blocks * np.arange(_BLOCK)[:, None]).reshape(rows, -1)
    rest = np.broadcast_to(np.arange(blocks * _BLOCK, size), (rows, size - blocks * _BLOCK))
    ids = np.concatenate([inside, rest], axis=1)
    places = _largest(np.take_along_axis(logits, ids, axis=1), count)
    return np.take_along_axis(ids, places, axis=1).astype(np.int32)


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return where the largest values [T, N] of each row are, int64 [T, count], the largest first."""
    left, every, found = values.copy(), np.arange(len(values)), np.empty((len(values), count), np.int64)
    found[:, 0] = best = left.argmax(axis=1)
    for place in range(1, count):
        left[every, best] = -np.inf
        found[:, place] = best = left.argmax(axis=1)
    if np.isneginf(left[every, best]).any():  # it cannot be told which of those were taken
        return np.argsort(-values, axis=1, kind="stable")[:, :count]
    return found
