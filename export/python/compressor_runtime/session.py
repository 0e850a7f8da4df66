"""A decoder's keys, values and states, and the step that appends tokens to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, token_ids, whole
from compressor_runtime.errors import RequestError
from compressor_runtime.manifest import DENSE_CACHE
from compressor_runtime.tensors import aligned_zeros, to_tvm


class Session:
    """Keys, values and states of the tokens seen so far; made by :meth:`Bundle.session`."""

    def __init__(
        self,
        model: dict[str, Any],
        limit: int,
        call: Callable[..., Any],
        batch: int,
        capacity: int,
        memory: Sequence[Any] = (),  # of an encoder-decoder: what its steps read of the source
    ) -> None:
        self._model, self._limit, self._call, self._memory = model, limit, call, tuple(memory)
        self._batch, self._capacity, self._position, self._stored = whole("batch", batch, 1), 0, 0, 0
        self._caches: list[Any] = []  # keys of every layer, then values: f32 [B, Hkv, T, D], or u8 of a row's bytes
        self._states: list[Any] = []  # of recurrent layers, f32 [B, ...]; kernels write them
        self._check_memory(model.get("state_bytes", 0) * self._batch, f"{self._batch} sequences")
        self._forget_states()
        self._resize(max(1, min(whole("capacity", capacity, 0), limit)))

    @property
    def batch(self) -> int:
        """Sequences, of as many tokens each."""
        return self._batch

    @property
    def capacity(self) -> int:
        """Tokens that fit before the memory of keys and values must grow."""
        return self._capacity

    @property
    def position(self) -> int:
        """Tokens that the next step comes after.

        It may be set back, to go on from an earlier token, and forward again as far as keys and values are stored: a
        step forgets those behind its own tokens.  Recurrent layers keep one state, that of the last token: a model that
        has any goes back to 0 only, and forgets all.

        Raises:
            RequestError: not a whole number from 0 to the tokens stored, or between them where there are states.
        """
        return self._position

    @position.setter
    def position(self, value: int) -> None:  # kernels write keys and values at this row, unchecked
        position = whole("position", value, 0, self._stored)
        if self._states and position not in (0, self._position):
            raise RequestError(
                f"position={position}: the model's recurrent layers keep no state but that of token {self._position}; "
                "give 0 to begin again"
            )
        if self._states and position == 0:
            self._stored = 0
            self._forget_states()
        self._position = position

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
        tokens = token_ids(ids, self._model["vocab_size"])
        count = tokens.shape[1]
        rows = np.array([count - 1]) if keep is None else array("keep", keep)
        inside = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < count
        if tokens.shape[0] != self._batch or not inside:
            raise RequestError(
                f"ids {list(tokens.shape)}, keep {rows.tolist()}: the session's batch is {self._batch}, and keep must "
                "list indices of these tokens"
            )
        self.make_room(count)
        inputs = (tokens, np.arange(self._position, self._position + count), rows.astype(np.int64))
        kept = (*self._caches, *self._states, *self._memory)
        logits: NDArray[np.float32] = self._call(*(to_tvm(x) for x in inputs), *kept)
        self._position += count
        self._stored = self._position
        return logits

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` more tokens fit.

        Raises:
            RequestError: the model has too few positions, or the machine too little memory.
        """
        count = whole("count", count, 0)
        needed = self._position + count
        if needed > self._limit:
            raise RequestError(
                f"{count} tokens after {self._position} others: the model ends at {self._limit} positions; "
                "give fewer tokens, or start a new session"
            )
        if needed > self._capacity:
            self._resize(min(self._limit, max(needed, 2 * self._capacity)))

    def _resize(self, capacity: int) -> None:
        model, caches = self._model, []
        size_bytes = model["cache_bytes_per_token"] * self._batch * capacity
        self._check_memory(size_bytes, f"{self._batch} sequences of {capacity} tokens")
        dtype = np.dtype(np.float32 if model["cache_format"] == DENSE_CACHE else np.uint8)
        row_bytes = model["cache_bytes_per_token"] // max(1, 2 * model["layers"] * model["kv_heads"])
        for index in range(2 * model["layers"]):
            cache = aligned_zeros((self._batch, model["kv_heads"], capacity, row_bytes // dtype.itemsize), dtype)
            if self._caches:
                cache[:, :, : self._stored] = np.from_dlpack(self._caches[index])[:, :, : self._stored]
                self._caches[index] = None  # at most one layer is held twice
            caches.append(to_tvm(cache))
        self._caches, self._capacity = caches, capacity

    def _forget_states(self) -> None:
        shapes = self._model.get("states", [])
        self._states = [to_tvm(aligned_zeros((self._batch, *shape), np.dtype(np.float32))) for shape in shapes]

    @staticmethod
    def _check_memory(size_bytes: int, what: str) -> None:
        if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise RequestError(
                f"{what}: their keys, values and states take {size_bytes} bytes, more than this machine's memory; give "
                "fewer or shorter ones"
            )
