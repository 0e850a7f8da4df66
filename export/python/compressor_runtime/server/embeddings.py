"""Embed texts by an encoder: hidden states of equally long texts together, pooled to one vector each."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.batching.rows import MOST_ROWS
from compressor_runtime.errors import RequestError

POOLINGS = ("mean", "cls", "max")


class Embedder:
    """Embeds texts.

    Args:
        bundle: a :class:`~compressor_runtime.bundle.Bundle` of an encoder.
        pooling: "mean", "cls" or "max" over the hidden states of a text; None takes the manifest's.
    Raises:
        RequestError: neither says how to pool.
    """

    def __init__(self, bundle: Any, pooling: str | None) -> None:
        self._bundle, self.pooling = bundle, pooling or bundle.model.get("pooling")
        if self.pooling not in POOLINGS:
            raise RequestError(
                f"{bundle.path}: the manifest does not say how hidden states become an embedding; give --pooling "
                f"{' or '.join(POOLINGS)}, as the model was trained"
            )

    def embed(self, rows: Sequence[Sequence[int]], goes_on: Callable[[], bool]) -> list[NDArray[np.float32]]:
        """Return an embedding of length 1, float32 [H], for each row of token ids.

        Rows of the same length share a call, so that no text is padded: its embedding does not depend on the others.

        Args:
            goes_on: asked before each call; what is not computed when it says no is left out.
        """
        found: dict[int, NDArray[np.float32]] = {}
        by_length: dict[int, list[int]] = {}
        for place, ids in enumerate(rows):
            by_length.setdefault(len(ids), []).append(place)
        for places in by_length.values():
            for begin in range(0, len(places), MOST_ROWS):
                if not goes_on():
                    return []
                part = places[begin : begin + MOST_ROWS]
                hidden = self._bundle.encode(np.array([rows[place] for place in part], np.int64))
                found.update(zip(part, self._pooled(hidden), strict=True))
        return [found[place] for place in range(len(rows))]

    def _pooled(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        vectors = {"mean": hidden.mean(1), "cls": hidden[:, 0], "max": hidden.max(1)}[self.pooling]
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        scaled: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
        return scaled


def as_told(vector: NDArray[np.float32], is_base64: bool) -> str | list[float]:
    """Return a vector as JSON has it: numbers, or base64 of float32, least significant byte first."""
    if is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
