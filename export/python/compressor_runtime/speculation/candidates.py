"""Choose the likeliest candidates of logits, and grow trees of them, the likeliest node first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.tree import Room, Tree

_BLOCK = 64  # logits of which one maximum is taken first
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
