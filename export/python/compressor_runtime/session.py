"""A decoder's keys, values and states, and the step that appends tokens to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, token_ids, whole
from compressor_runtime.device.gpu import Gpu
from compressor_runtime.device.host import Host
from compressor_runtime.device.recorded import Record, RecordedStep
from compressor_runtime.errors import RequestError
from compressor_runtime.manifest import DENSE_CACHE


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
        device: Host | Gpu | None = None,
        record: Record | None = None,
    ) -> None:
        self._model, self._limit, self._call, self._memory = model, limit, call, tuple(memory)
        self._device, self._record = device or Host(), record
        self._recorded: RecordedStep | None = None
        self._steps_of_one = 0  # tokens that were a step each; the first is not recorded: there may be no second
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
        logits = self._logits(tokens, rows)
        self._position += count
        self._stored = self._position
        return logits

    def _logits(self, tokens: NDArray[np.int64], rows: NDArray[Any]) -> NDArray[np.float32]:
        kept = (*self._caches, *self._states, *self._memory)
        if self._record is not None and tokens.shape[1] == len(rows) == 1 and not self._states:
            if self._steps_of_one and self._recorded is None:
                self._recorded = self._record(tokens, self._position, kept)
            self._steps_of_one += 1
            if self._recorded is not None:
                return self._recorded(tokens, self._position)
        inputs = (tokens, np.arange(self._position, self._position + tokens.shape[1]), rows.astype(np.int64))
        logits: NDArray[np.float32] = self._call(*(self._device.put(x) for x in inputs), *kept)
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
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None
        shape = (self._batch, model["kv_heads"], capacity, row_bytes // dtype.itemsize)
        for index in range(2 * model["layers"]):
            if self._caches:
                caches.append(self._device.grown(self._caches[index], shape, dtype, self._stored))
                self._caches[index] = None  # at most one layer is held twice
            else:
                caches.append(self._device.zeros(shape, dtype))
        self._caches, self._capacity = caches, capacity

    def _forget_states(self) -> None:
        shapes = self._model.get("states", [])
        self._states = [self._device.zeros((self._batch, *shape), np.dtype(np.float32)) for shape in shapes]

    def _check_memory(self, size_bytes: int, what: str) -> None:
        self._device.check_room(size_bytes, f"{what}: their keys, values and states")
