"""Run the stages of a decoder on rows of the residual stream.

begin:               tokens -> stream, and what depends on positions
stage 0 ... stage n: stream -> stream, keys and values to caches
end:                 stream -> logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.parts import OF_ROWS, Parts
from compressor_runtime.speculation.parts import Rows as PartRows

MOST_ROWS = 32
"""Rows that one call may have so that each has the bits of a call of its own."""


@dataclass(frozen=True)
class Rows:
    """Tokens of one or several sequences, each with its place.

    Attributes:
        ids: int64 [T].
        position: int64 [T], which is also the row of its keys and values.
        parent: int64 [T], the index of the token before it among these, or -1 where that is stored.
        slot: int64 [T], its sequence.
    """

    ids: NDArray[np.int64]
    position: NDArray[np.int64]
    parent: NDArray[np.int64]
    slot: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def chain(cls, ids: Sequence[int], first: int) -> Rows:
        """Return tokens in a row of the sequence 0, from a position on."""
        count = len(ids)
        places = np.arange(first, first + count)
        return cls(np.array(ids, np.int64), places, np.arange(-1, count - 1), np.zeros(count, np.int64))

    def named(self) -> dict[str, NDArray[np.int64]]:
        """Return them as entries name them."""
        given = (self.ids, self.position, self.parent, self.slot, self.position)
        return dict(zip(OF_ROWS, given, strict=True))


class Stages:
    """The stages of a session's model.

    Args:
        parts: of the session: its first one begins, its last one ends, and each between is a stage.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def begin(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Return the stream in front of the first stage, float32 [1, T, C], with what stages share."""
        return self._parts.begin(rows.named()).values

    def run(
        self, number: int, rows: Rows, stream: NDArray[np.float32], shared: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return the stream behind a stage, float32 [1, T, C]; keys and values of its blocks are written.

        Args:
            shared: of these rows, by :meth:`begin`.
        """
        moving = PartRows(rows.named(), {**shared, "stream": stream})
        self._parts.run(moving, number)
        return moving.values["stream"]

    def end(self, stream: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return logits of all rows of a stream, float32 [T, V]."""
        return self._parts.end(PartRows({}, {"stream": stream}), np.arange(stream.shape[1]))
