"""A decoder's keys and values, and the step that appends tokens to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.errors import RequestError
from compressor_runtime.manifest import DENSE_CACHE
from compressor_runtime.tensors import aligned_zeros, to_tvm


def checked_ids(ids: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    """Return token ids as int64 [B, S].

    Raises:
        RequestError: they are not whole numbers [B, S], or lie outside the vocabulary.
    """
    tokens = np.asarray(ids)
    if tokens.ndim != 2 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise RequestError(f"ids must be whole numbers [batch, tokens], not {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:  # the kernels would read outside the table
        raise RequestError(
            f"token ids from {tokens.min()} to {tokens.max()}: the model knows 0 to "
            f"{vocab_size - 1}; does the tokenizer belong to this model?"
        )
    return tokens.astype(np.int64, copy=False)


class Session:
    """Keys and values of the tokens seen so far; made by :meth:`Bundle.session`.

    ``position`` may be set back, to go on from an earlier token.
    """

    def __init__(self, model: dict[str, Any], limit: int, call: Callable[..., Any], batch: int, capacity: int) -> None:
        if batch < 1:
            raise RequestError(f"batch={batch}: at least one is needed")
        self._model, self._limit, self._call = model, limit, call
        self.batch, self.position, self.capacity = batch, 0, 0
        self._caches: list[Any] = []  # keys of every layer, then values: f32 [B, Hkv, T, D], or u8 of a row's bytes
        self._resize(max(1, min(capacity, limit)))

    def step(self, ids: ArrayLike, keep: ArrayLike | None = None) -> NDArray[np.float32]:
        """Append tokens.

        Args:
            ids: whole numbers [B, S].
            keep: indices [R] along S whose logits are wanted; None for the last.
        Returns:
            logits float32 [B, R, V].
        Raises:
            RequestError: ids out of range, another batch, or more tokens than the model has positions.
        """
        tokens = checked_ids(ids, self._model["vocab_size"])
        count = tokens.shape[1]
        rows = np.array([count - 1]) if keep is None else np.asarray(keep)
        inside = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < count
        if tokens.shape[0] != self.batch or not inside:
            raise RequestError(
                f"ids {list(tokens.shape)}, keep {rows.tolist()}: the session's batch is {self.batch}, and keep must "
                "list indices of these tokens"
            )
        self.make_room(count)
        inputs = (tokens, np.arange(self.position, self.position + count), rows.astype(np.int64))
        logits: NDArray[np.float32] = self._call(*(to_tvm(x) for x in inputs), *self._caches)
        self.position += count
        return logits

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` more tokens fit.

        Raises:
            RequestError: the model has too few positions, or the machine too little memory.
        """
        needed = self.position + count
        if needed > self._limit:
            raise RequestError(
                f"{count} tokens after {self.position} others: the model ends at {self._limit} positions; "
                "give fewer tokens, or start a new session"
            )
        if needed > self.capacity:
            self._resize(min(self._limit, max(needed, 2 * self.capacity)))

    def _resize(self, capacity: int) -> None:
        model, caches = self._model, []
        size_bytes = model["cache_bytes_per_token"] * self.batch * capacity
        if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise RequestError(
                f"{self.batch} sequences of {capacity} tokens: their keys and values take {size_bytes} bytes, more "
                "than this machine's memory; give fewer or shorter ones"
            )
        dtype = np.dtype(np.float32 if model["cache_format"] == DENSE_CACHE else np.uint8)
        row_bytes = model["cache_bytes_per_token"] // (2 * model["layers"] * model["kv_heads"])
        for index in range(2 * model["layers"]):
            cache = aligned_zeros((self.batch, model["kv_heads"], capacity, row_bytes // dtype.itemsize), dtype)
            if self._caches:
                cache[:, :, : self.position] = np.from_dlpack(self._caches[index])[:, :, : self.position]
                self._caches[index] = None  # at most one layer is held twice
            caches.append(to_tvm(cache))
        self._caches, self.capacity = caches, capacity
