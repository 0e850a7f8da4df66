"""A small causal model in NumPy, cut into stages that write keys and values to caches, and run as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from compressor_runtime.depth.stages import Stages
from compressor_runtime.speculation.parts import Parts
from numpy.typing import NDArray

WIDTH, VOCABULARY = 6, 11


class ToyModel:
    """A model of blocks, each of which adds attention over its inputs' rows.

    Args:
        bounds: blocks in front of each stage, from 0, and all of them last.
        slots: sequences.
        room: rows of a cache; those that nothing has written are NaN.
    """

    def __init__(self, bounds: Sequence[int], slots: int = 1, room: int = 64) -> None:
        generator = np.random.default_rng(5)
        self.table = generator.normal(size=(VOCABULARY, WIDTH))
        self.weights = generator.normal(size=(bounds[-1], 3, WIDTH, WIDTH)) / 2
        self.caches = np.full((2 * bounds[-1], slots, room, WIDTH), np.nan)
        self.calls: list[tuple[str, int]] = []  # entries, and rows of each call
        self._bounds = [*pairwise(bounds)]
        places = ["position", "parent", "slot", "row"]
        caches = [[f"{kind}_cache_{i}" for kind in "kv" for i in range(*bound)] for bound in self._bounds]
        self.parts: list[dict[str, Any]] = [
            {"entry": "begin", "takes": ["ids", "position"], "gives": ["stream", "shared_0"], "axes": [1, 1]},
            *(
                {"entry": f"stage_{i}", "takes": [*places, *own, "stream", "shared_0"], "gives": ["stream"]}
                for i, own in enumerate(caches)
            ),
            {"entry": "end", "takes": ["keep", "stream"], "gives": ["logits"]},
        ]
        calls = {part["entry"]: partial(self.call, part["entry"]) for part in self.parts}
        self.stages = Stages(Parts(self.parts, calls, lambda array: array, lambda: self.caches))

    def call(self, entry: str, *arguments: Any) -> Any:
        """Run an entry, as a library does."""
        self.calls.append((entry, arguments[-1].shape[1] if entry != "begin" else len(arguments[1])))
        if entry == "begin":
            ids, position = arguments
            return [self.table[ids], np.cos(position)[None, :, None]]
        if entry == "end":
            keep, stream = arguments
            return (2 * np.tanh(stream) @ self.table.T)[:, keep]
        position, parent, slot, row, *_, stream, shared = arguments
        assert np.array_equal(shared[0, :, 0], np.cos(position)), "values of these positions"
        first, last = self._bounds[int(entry.rpartition("_")[2])]
        for block in range(first, last):
            stream = self._block(block, stream, shared, position, parent, slot, row)
        return stream

    def _block(self, block: int, stream: Any, shared: Any, position: Any, parent: Any, slot: Any, row: Any) -> Any:
        q, k, v = (np.einsum("btc,cd->btd", np.tanh(stream + shared), w)[0] for w in self.weights[block])
        added = np.empty_like(q)
        for i in range(len(q)):
            path, at = [i], i
            while parent[at] >= 0:
                at = parent[at]
                path.insert(0, at)
            stored = position[path[0]]
            layers = len(self.weights)
            keys = [*self.caches[block, slot[i], :stored], *k[path]]
            values = [*self.caches[layers + block, slot[i], :stored], *v[path]]
            weights = np.exp(np.array(keys) @ q[i] / 3)
            added[i] = weights @ np.array(values) / weights.sum()
        self.caches[block, slot, row], self.caches[len(self.weights) + block, slot, row] = k, v
        return stream + added[None]

    def whole(self, ids: Sequence[int], blocks: Sequence[Sequence[int]] | None = None) -> NDArray[np.float64]:
        """Return logits [S, n + 1, V] behind each of n blocks, token by token over one cache.

        Args:
            blocks: those that each token runs; None for all.
        """
        count = len(self.weights)
        fresh = ToyModel([0, *range(1, count + 1)])
        found = np.empty((len(ids), count + 1, VOCABULARY))
        for place, token in enumerate(ids):
            at, own = np.array([place]), np.array([-1])
            stream, shared = fresh.call("begin", np.array([[token]]), at)
            for block in range(count + 1):
                found[place, block] = fresh.call("end", np.array([0]), stream)[0, 0]
                if block < count and (blocks is None or block in blocks[place]):
                    stream = fresh._block(block, stream, shared, at, own, np.array([0]), at)
        assert np.isfinite(found).all(), "a row that nothing has written was read"
        return found
