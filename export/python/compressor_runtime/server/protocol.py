"""Close connections whose requests' heads do not come, and let a server end with its requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit of time for each request's head, which it has not."""

    class TimedProtocol(H11Protocol):
        """HTTP/1.1 whose heads come in time, or not at all."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begin to wait for the first head."""
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            """Take data, and wait for the rest of a head that is not whole."""
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """Wait no more."""
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            # IDLE: the head is not there yet.  A client that sends nothing after an answer has uvicorn's own timer.
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._stop()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimedProtocol


class Server(uvicorn.Server):
    """A server that lets its requests end, and does not end the process by the signal that stopped it.

    Args:
        config: of uvicorn.
        drain: called when no new connections are taken; returns when no request is left.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections, and end the others when their requests have ended."""
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)
        await draining

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Stop at a signal; at the second one, at once."""
        try:
            former = {number: signal.signal(number, self._stop_at) for number in SIGNALS}
        except ValueError:  # not the main thread: somebody else's signals
            former = {}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _stop_at(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
