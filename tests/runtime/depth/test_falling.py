"""Depth that falls with the position: each sequence's token runs its own blocks, and no missing row is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from compressor_runtime.depth.falling import FallingDepth
from compressor_runtime.depth.stages import inputs_of
from compressor_runtime.generation import Depth
from numpy.typing import NDArray
from toy_stages import VOCABULARY, ToyModel

ENDS = [None, 4, 9, 9, None]
BOUNDS = [0, 1, 2, 4, 5]


def test_sequences_of_different_lengths_run_their_own_blocks() -> None:
    generator = np.random.default_rng(2)
    texts, late = generator.integers(0, VOCABULARY, (2, 14)), 3
    model, wholes = ToyModel(BOUNDS, slots=2), list[list[int]]()
    steps = FallingDepth(model.stages, ENDS)
    steps.depth = Depth(len(ENDS))
    blocks = [[b for b, end in enumerate(ENDS) if end is None or place < end] for place in range(14)]
    wanted = [model.whole(text, blocks)[:, -1] for text in texts]

    def step(ids: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[Any]:
        def whole(tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float32]:
            wholes.append(places.tolist())
            inputs = inputs_of(tokens[:, 0], places, np.full_like(places, -1), np.arange(len(places)))
            given = model.stages.begin(inputs)
            stream = given["stream"]
            for number in range(len(BOUNDS) - 1):
                stream = model.stages.run(number, inputs, stream, given)
            return model.stages.end(stream)[:, None][:, rows]

        return steps.step(ids[:, None], places, whole)[:, 0]

    ran = 0
    for place in range(late):  # the first sequence alone, in a batch of one
        found = step(texts[0, place : place + 1], np.array([place]))
        np.testing.assert_allclose(found[0], wanted[0][place], rtol=1e-9)
        ran += len(blocks[place])
    for place in range(14 - late):
        at = np.array([place + late, place])
        found = step(texts[[0, 1], at], at)
        for slot in range(2):
            np.testing.assert_allclose(found[slot], wanted[slot][at[slot]], rtol=1e-9)
        ran += len(blocks[at[0]]) + len(blocks[at[1]])
    assert steps.depth.ran == ran and steps.depth.tokens == 2 * 14 - late
    assert np.isnan(model.caches[1, 0, 4:]).all(), "what is passed by is not written"
    assert wholes == [[0], [1], [2], [3, 0]], "in front of the first end, one call runs all blocks"
