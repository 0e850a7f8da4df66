"""Leave out the blocks that tokens pass by from a position on (SkipDecode): a step of all sequences, in stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.depth.stages import Stages, inputs_of
from compressor_runtime.generation import Depth
from compressor_runtime.speculation.parts import Parts

Whole: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""All blocks in one call: tokens [B, 1], and the rows wanted of each sequence, [0] -> logits [B, 1, V]."""


class FallingDepth:
    """Steps of one token for each sequence.

    Args:
        stages: of the model, one for each run of blocks that end at the same position.
        ends: of each block, the first position whose token passes it by; None where all run it.

    Attributes:
        depth: counts, which steps add to; None counts nothing.
    """

    def __init__(self, stages: Stages, ends: Sequence[int | None]) -> None:
        self._stages = stages
        self._ends = [(end, len(list(blocks))) for end, blocks in groupby(ends)]
        self._first = min((end for end in ends if end is not None), default=math.inf)
        self.depth: Depth | None = None

    def step(self, ids: NDArray[np.int64], position: NDArray[np.int64], whole: Whole) -> NDArray[np.float32]:
        """Read a token of each sequence, and return the logits of what comes next, float32 [B, 1, V].

        Stages are called one by one, which takes longer than one call, so only where a token passes a block by.

        Args:
            ids: int64 [B, 1].
            position: int64 [B], of each.
            whole: runs all blocks.
        """
        if position.max() < self._first:
            self._count(len(ids), sum(blocks for _, blocks in self._ends) * len(ids))
            return whole(ids, np.zeros(1, np.int64))
        every, ids = np.arange(len(ids)), ids[:, 0]
        inputs = inputs_of(ids, position, np.full_like(every, -1), every)
        given = self._stages.begin(inputs)
        stream, ran = given["stream"], 0
        for number, (end, blocks) in enumerate(self._ends):
            runs = every if end is None else every[position < end]
            ran += blocks * len(runs)
            if len(runs) == len(ids):
                stream = self._stages.run(number, inputs, stream, given)
            elif len(runs):
                part = inputs_of(ids[runs], position[runs], np.full_like(runs, -1), runs)
                stream = stream.copy()
                stream[:, runs] = self._stages.run(number, part, stream[:, runs], self._stages.begin(part))
        self._count(len(ids), ran)
        return self._stages.end(stream)[:, None]

    def _count(self, tokens: int, ran: int) -> None:
        if self.depth is not None:
            self.depth.tokens, self.depth.heads = self.depth.tokens + tokens, self.depth.heads + tokens
            self.depth.ran += ran


def falling_depth(model: Mapping[str, Any], parts: Parts) -> FallingDepth | None:
    """Return the steps of a session whose tokens pass blocks by; None where they do not, or no stages are there."""
    ends = model.get("depths")
    return FallingDepth(Stages(parts), ends) if ends is not None and "parts" in model else None
