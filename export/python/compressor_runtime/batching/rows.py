"""Decode requests in one batch, which they join and leave at any step: continuous batching.

    round    joining (one at a time)        batch, a row each            left
    1        C: prompt, tokens 0 to 127     A B                          -
    2        C: prompt, the rest            A B                          -
    3        -                              A B C                        -
    4        -                              A   C                        B ended: its row is free

A prompt is read by a session of its own, in chunks of one size between the steps of the others, so that these wait
for a chunk at most; then its keys and values are copied into a row of the batch.  A step is a verification of one token
of each row: sequences have lengths of their own there, and up to 32 rows have the bits of single ones.  So a request's
tokens are the same whatever runs beside it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor_runtime.batching.request import Request
from compressor_runtime.errors import BundleError, RequestError

MOST_ROWS = 32
"""For so many rows a row's bits do not depend on the others."""

CHUNK_TOKENS = 128
"""Of a prompt, between two steps of the batch."""

_FIRST_CAPACITY = 256


@dataclass
class _Joining:
    request: Request
    session: Any
    read: int = 0


class Rows:
    """Requests of a decoder in one batch.

    Args:
        bundle: a :class:`~compressor_runtime.bundle.Bundle` whose library has the entry ``verify``.
        batch: rows.
    """

    def __init__(self, bundle: Any, batch: int) -> None:
        self._bundle, self._batch = bundle, batch
        self.reset()

    @property
    def free(self) -> int:
        """Requests that may be added."""
        return self._batch - len(self._rows) - len(self._joining)

    @property
    def requests(self) -> list[Request]:
        """Those that were added and have neither ended nor been dropped."""
        return [*(joining.request for joining in self._joining), *self._rows.values()]

    def reset(self) -> None:
        """Forget all requests."""
        self._session = self._bundle.session(self._batch, min(_FIRST_CAPACITY, self._bundle.limit))
        self._rows: dict[int, Request] = {}
        self._joining: deque[_Joining] = deque()

    def add(self, request: Request) -> None:
        """Let a request join; there must be a free row.

        Raises:
            RequestError: this machine's memory cannot hold its keys and values.
        """
        self._joining.append(_Joining(request, self._bundle.session(1, len(request.prompt))))

    def drop(self, request: Request) -> None:
        """Free the row of a request, or end its joining."""
        self._joining = deque(one for one in self._joining if one.request is not request)
        for row in [row for row, other in self._rows.items() if other is request]:
            del self._rows[row]
            lengths = self._session.lengths
            lengths[row] = 0
            self._session.lengths = lengths

    def round(self) -> None:
        """Read a chunk of the first prompt that waits, and give each request in the batch a token."""
        if self._joining:
            self._read(self._joining[0])
        if self._rows:
            self._step()

    def _read(self, joining: _Joining) -> None:
        request = joining.request
        chunk = request.prompt[joining.read : joining.read + CHUNK_TOKENS]
        try:
            logits = joining.session.step([chunk])[0, -1]
            joining.read += len(chunk)
            if joining.read < len(request.prompt):
                return
            if self._goes_on(request, logits):
                row = next(row for row in range(self._batch) if row not in self._rows)
                self._session.take(row, joining.session)
                self._rows[row] = request
        except BundleError as error:
            request.fail(error)
        self._joining.popleft()

    def _step(self) -> None:
        rows = [*self._rows]
        try:
            ids = [self._rows[row].last for row in rows]
            logits = self._session.verify(ids, [-1] * len(rows), rows)
        except RequestError as error:  # too little memory for another token of the longest
            longest = max(rows, key=lambda row: self._session.lengths[row])
            self._rows[longest].fail(error)
            self.drop(self._rows[longest])
            return
        self._session.accept({row: [index] for index, row in enumerate(rows)})
        for index, row in enumerate(rows):
            request = self._rows[row]
            try:
                goes_on = self._goes_on(request, logits[index])
            except BundleError as error:
                request.fail(error)
                goes_on = False
            if not goes_on:
                self.drop(request)

    def _goes_on(self, request: Request, logits: np.ndarray[Any, Any]) -> bool:
        """Choose a request's next token from logits [V]; tell whether there is another one to come."""
        token = request.pick(logits)
        if token in request.ends:
            request.end(request.ends[token])
        else:
            request.add(token)
        return not request.ended
