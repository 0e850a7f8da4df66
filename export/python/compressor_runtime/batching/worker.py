"""Run requests on a thread of their own: a bounded queue, a batch that is filled from it, and its end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from compressor_runtime.batching.request import CANCELLED, Request
from compressor_runtime.batching.rows import MOST_ROWS, Rows
from compressor_runtime.batching.turns import Turns
from compressor_runtime.depth.tokens import counts_of
from compressor_runtime.device.host import Host
from compressor_runtime.errors import BundleError, RequestError

_log = logging.getLogger("compressor.server")


class Decoder(Protocol):
    """What gives requests their tokens, as :class:`Rows` and :class:`Turns`."""

    @property
    def free(self) -> int:
        """Requests that may be added."""

    @property
    def requests(self) -> list[Request]:
        """Those that were added and go on."""

    def reset(self) -> None:
        """Forget all requests."""

    def add(self, request: Request) -> None:
        """Take a request."""

    def drop(self, request: Request) -> None:
        """Forget a request."""

    def round(self) -> None:
        """Give requests a token each."""


class Busy(Exception):
    """The queue is full, or the worker ends; the message says which."""


def why_turns(bundle: Any) -> str:
    """Return why a bundle's requests do not share a batch; empty if they do."""
    if not isinstance(bundle.device, Host):
        return "its kernels are for a GPU"
    if bundle.kind != "decoder":
        return f"it holds a {bundle.kind}"
    if "verify" not in bundle.entries:
        return "it has no kernels that verify drafted tokens (give `speculate: lookup` in its recipe)"
    if counts_of(bundle, "off", 0.0) is not None:
        return "its tokens do not run all blocks"
    return ""


def decoder_of(bundle: Any, batch: int) -> Decoder:
    """Return what gives a bundle's requests their tokens: rows of a batch, or turns where :func:`why_turns` says so.

    Raises:
        RequestError: more requests at once than rows may be.
    """
    if not 1 <= batch <= MOST_ROWS:
        raise RequestError(
            f"batch={batch}: give a number from 1 to {MOST_ROWS}, up to which rows do not depend on others"
        )
    return Turns(bundle, batch) if why_turns(bundle) else Rows(bundle, batch)


class Worker:
    """The thread that generates.

    Args:
        decoder: used by this thread only.
        most_waiting: requests in the queue.
    """

    def __init__(self, decoder: Decoder, most_waiting: int) -> None:
        self._decoder, self.most_waiting = decoder, most_waiting
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = self._ends = False
        self._running = 0
        self.failures = 0  # rounds that ended in an unexpected error
        self._thread = threading.Thread(target=self._run, name="compressor-batch", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that are in the batch or join it."""
        return self._running

    @property
    def is_alive(self) -> bool:
        """Tell whether requests can still be served."""
        return self._thread.is_alive() and not self._closed

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue: all of them, or none.

        Raises:
            Busy: there is no room for them, or the worker ends.
        """
        with self._changed:
            if self._closed:
                raise Busy("the server is stopping")
            if len(self._waiting) + len(requests) > self.most_waiting:
                raise Busy(f"{len(self._waiting)} requests wait already, of at most {self.most_waiting}")
            self._waiting.extend(requests)
            self._changed.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Free what requests hold: at once in the queue, before the next token in the batch."""
        with self._changed:
            for request in requests:
                request.cancelled = True
            gone = [request for request in self._waiting if request.cancelled]
            self._waiting = deque(request for request in self._waiting if not request.cancelled)
            self._changed.notify()
        for request in gone:
            request.end(CANCELLED)

    def refuse(self) -> None:
        """Take no more requests; those in the queue and in the batch go on."""
        with self._changed:
            self._closed = True

    def close(self, seconds: float) -> int:
        """Let requests end within a time, then fail the others; return how many these were.  The thread ends."""
        self.refuse()
        limit = time.monotonic() + seconds
        while (self._waiting or self._running) and self._thread.is_alive() and time.monotonic() < limit:
            time.sleep(0.02)
        with self._changed:
            self._ends = True
            left = len(self._waiting) + self._running
            self._changed.notify()
        self._thread.join()
        return left

    def _run(self) -> None:
        while self._admit():
            try:
                self._decoder.round()
            except Exception as error:  # of the kernels: the server goes on with others
                _log.exception("a round of the batch failed")
                self.failures += 1
                for request in self._decoder.requests:
                    request.fail(error)
                self._decoder.reset()
            self._running = len(self._decoder.requests)
        for request in [*self._waiting, *self._decoder.requests]:
            request.fail(Busy("the server stopped before this was done"))
        self._waiting.clear()
        self._running = 0

    def _admit(self) -> bool:
        """Wait for work, and fill the batch from the queue; False at the worker's end."""
        for request in [request for request in self._decoder.requests if request.cancelled]:
            request.end(CANCELLED)
            self._decoder.drop(request)
        with self._changed:
            self._running = len(self._decoder.requests)
            while not (self._ends or self._waiting or self._running):
                self._changed.wait()
            if self._ends:
                return False
            new = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._decoder.free))]
            self._running += len(new)
        for request in new:
            request.admitted = time.monotonic()
            try:
                self._decoder.add(request)
            except BundleError as error:
                request.fail(error)
        return True
