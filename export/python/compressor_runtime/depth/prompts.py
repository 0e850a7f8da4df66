"""Fill caches with the keys and values that a small model predicts of a prompt (KV Prediction, arXiv 2410.08391)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import token_ids

PREDICT = "predict"
"""Name of the entry."""


class Prompts:
    """Predict keys and values of a session's first tokens.

    Args:
        predict: the entry: ids, positions, caches of the copied layers -> rows [2 * layers, B, Hkv, S, D].
        model: facts of the manifest.
        put: makes a tensor of the device of an array.
        caches: keys of every layer, then values, as tensors of the host.
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        model: Mapping[str, Any],
        put: Callable[[NDArray[Any]], Any],
        caches: Callable[[], Sequence[Any]],
    ) -> None:
        self._predict, self._put, self._caches = predict, put, caches
        self._layers, self._copied, self._vocab_size = model["layers"], model["predicts"], model["vocab_size"]

    def fill(self, ids: ArrayLike) -> None:
        """Write the rows of tokens [B, S] but the last, which caches that hold none have room for.

        Raises:
            RequestError: ids out of range.
        """
        tokens = token_ids(ids, self._vocab_size)[:, :-1]
        caches, places = self._caches(), np.arange(tokens.shape[1])
        scratch = (*caches[: self._copied], *caches[self._layers : self._layers + self._copied])
        rows = self._predict(self._put(np.ascontiguousarray(tokens)), self._put(places), *scratch)
        for cache, predicted in zip(caches, rows, strict=True):
            np.from_dlpack(cache)[:, :, : len(places)] = predicted


def prompts_of(
    entries: Mapping[str, Callable[..., Any]],
    model: Mapping[str, Any],
    put: Callable[[NDArray[Any]], Any],
    caches: Callable[[], Sequence[Any]],
) -> Prompts | None:
    """Return what predicts a session's first tokens; None where the bundle has no entry for it."""
    return Prompts(entries[PREDICT], model, put, caches) if PREDICT in entries else None


def read_prompt(session: Any, ids: ArrayLike) -> NDArray[np.float32]:
    """Append tokens as ``session.step`` does, and return the logits of the last, float32 [B, 1, V].

    Where the bundle predicts caches and the session is empty, all but the last token leave predicted rows alone; this
    is lossy.  ``session.step`` never predicts.
    """
    tokens, prompts = np.asarray(ids), session.prompts
    fits = tokens.ndim == 2 and len(tokens) == session.batch and tokens.shape[1] > 1  # `step` refuses others in words
    if prompts is not None and fits and not any(session.lengths):
        session.make_room(tokens.shape[1])
        prompts.fill(tokens)
        session.advance(tokens.shape[1] - 1)
        ids = tokens[:, -1:]
    logits: NDArray[np.float32] = session.step(ids)
    return logits
