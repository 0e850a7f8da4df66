"""Take a token behind some of the blocks where they are sure of it, and run the others for it when they are needed.

    token     0      1      2      3
    stage 0   run    run    run    run        tokens 0 to 2 left behind stage 0; token 3 did not, so stage 1 runs
    stage 1   late   late   late   run        all four at once, and reads its weights once

So keys and values are those of the whole model at every token, and what a text's end leaves undone is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.depth.stages import Inputs, Stages, chain_inputs
from compressor_runtime.generation import Depth
from compressor_runtime.speculation.engine import MOST_ROWS


class EarlyExits:
    """The steps of one sequence whose tokens may leave early.

    Args:
        stages: of the model; an exit stands behind each but the last.
        facts: of the exits, as the manifest has them.
        prompt: runs the tokens of a prompt through the whole model, ids int64 [1, S] -> logits float32 [V].
        advance: tells the session that so many tokens more come, and returns the position of the first.
        depth: counts, which it adds to.
    """

    def __init__(
        self,
        stages: Stages,
        facts: Mapping[str, Any],
        prompt: Callable[[NDArray[np.int64]], NDArray[np.float32]],
        advance: Callable[[int], int],
        depth: Depth,
    ) -> None:
        self._stages, self.prompt, self._advance, self.depth = stages, prompt, advance, depth
        self._bounds = [0, *facts["blocks"], depth.blocks]
        self._thresholds: list[float] = facts["thresholds"]
        self._give_up, self._window = float(facts["give_up"]), int(facts["window"])
        self._confidences: list[float] = []  # at the first exit, of the last tokens
        self._waiting: list[_Waiting] = [_Waiting() for _ in self._thresholds]  # in front of each later stage

    @property
    def is_hopeless(self) -> bool:
        """Tell whether the text is to be given up."""
        recent = self._confidences
        return bool(self._give_up) and len(recent) == self._window and sum(recent) / len(recent) < self._give_up

    def step(self, token: int) -> NDArray[np.float32]:
        """Read a token, and return the logits of what comes next, float32 [V]."""
        inputs: Inputs = chain_inputs([token], self._advance(1))
        given = self._stages.begin(inputs)
        stream = self._run(0, inputs, given["stream"], given)
        self.depth.tokens += 1
        for place, threshold in enumerate(self._thresholds):
            waiting = self._waiting[place]
            waiting.add(inputs, stream)
            asks = place == 0 and bool(self._give_up)
            if threshold <= 1 or asks:
                logits = self._end(stream)
                confidence = top_probability(logits)
                if asks:
                    self._confidences = [*self._confidences, confidence][-self._window :]
                if confidence >= threshold and len(waiting) < MOST_ROWS * (place + 1):
                    return logits
            inputs, stream = waiting.taken()
            self.depth.late += (stream.shape[1] - 1) * (self._bounds[place + 2] - self._bounds[place + 1])
            stream = self._run(place + 1, inputs, stream, given)
        return self._end(stream)

    def _run(
        self, number: int, inputs: Inputs, stream: NDArray[np.float32], of_last: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Run a stage, for as many rows at once as have the bits of single ones.

        Args:
            of_last: what stages share, of the last row.
        """
        count = stream.shape[1]
        self.depth.ran += count * (self._bounds[number + 1] - self._bounds[number])
        found = []
        for begin in range(0, count, MOST_ROWS):
            ids = inputs["ids"][begin : begin + MOST_ROWS].tolist()
            part = chain_inputs(ids, int(inputs["position"][begin]))
            shared = of_last if count == 1 else self._stages.begin(part)
            found.append(self._stages.run(number, part, stream[:, begin : begin + MOST_ROWS], shared))
        return np.concatenate(found, 1)

    def _end(self, stream: NDArray[np.float32]) -> NDArray[np.float32]:
        self.depth.heads += 1
        logits: NDArray[np.float32] = self._stages.end(stream[:, -1:])[0]
        return logits


class _Waiting:
    """Tokens that left behind a stage, and the stream there."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._first = 0
        self._streams: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, inputs: Inputs, stream: NDArray[np.float32]) -> None:
        """Let tokens wait, which follow those that do."""
        if not self._ids:
            self._first = int(inputs["position"][0])
        self._ids += inputs["ids"].tolist()
        self._streams.append(stream)

    def taken(self) -> tuple[Inputs, NDArray[np.float32]]:
        """Return all that wait, and let none wait any more."""
        inputs, stream = chain_inputs(self._ids, self._first), np.concatenate(self._streams, 1)
        self._ids, self._streams = [], []
        return inputs, stream


def top_probability(logits: NDArray[np.float32]) -> float:
    """Return the probability of the likeliest token of logits [V]."""
    return float(1 / np.exp(logits - logits.max(), dtype=np.float32).sum(dtype=np.float64))
