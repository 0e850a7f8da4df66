"""Run the stages of a decoder on rows of the residual stream.

begin:               tokens -> stream, and what depends on positions
stage 0 ... stage n: stream -> stream, keys and values to caches
end:                 stream -> logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.parts import OF_ROWS, Parts, Rows

Inputs: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Tokens of one or several sequences, each with its place, as entries name it: int64 [T] by name."""


def inputs_of(
    ids: NDArray[np.int64], position: NDArray[np.int64], parent: NDArray[np.int64], slot: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Return tokens as entries take them; keys and values of each lie at its position.

    Args:
        ids: int64 [T].
        position: int64 [T].
        parent: int64 [T], the index of the token before it among these, or -1 where that is stored.
        slot: int64 [T], its sequence.
    """
    return dict(zip(OF_ROWS, (ids, position, parent, slot, position), strict=True))


def chain_inputs(ids: Sequence[int], first: int) -> dict[str, NDArray[np.int64]]:
    """Return tokens in a row of the sequence 0, from a position on."""
    count = len(ids)
    places = np.arange(first, first + count)
    return inputs_of(np.array(ids, np.int64), places, np.arange(-1, count - 1), np.zeros(count, np.int64))


class Stages:
    """The stages of a session's model.

    Args:
        parts: of the session: its first one begins, its last one ends, and each between is a stage.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def begin(self, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """Return the stream in front of the first stage, float32 [1, T, C], with what stages share."""
        return self._parts.begin(inputs).values

    def run(
        self, number: int, inputs: Inputs, stream: NDArray[np.float32], shared: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return the stream behind a stage, float32 [1, T, C]; keys and values of its blocks are written.

        Args:
            shared: of these tokens, by :meth:`begin`.
        """
        moving = Rows(dict(inputs), {**shared, "stream": stream})
        self._parts.run(moving, number)
        return moving.values["stream"]

    def end(self, stream: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits of all rows of a stream, float32 [T, V]."""
        return self._parts.end(Rows({}, {"stream": stream}), np.arange(stream.shape[1]))
