"""Read bodies within limits, notice clients that go, and send streams to those that read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from compressor_runtime.server.errors import ApiError

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")

_DRAINED_BYTES, _DRAIN_SECONDS = 128 << 20, 10.0
"""Of a body that is too large so much is read and thrown away, so that its sender reads why."""


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


async def read_body(request: Any, most_bytes: int, seconds: float) -> bytes:
    """Return the body of a starlette request.

    Raises:
        ApiError: it is too large, is not said to be JSON, or does not come in time.
        ClientGone: the client went before its end.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "content-type: give application/json")  # which pages of other sites may not send unasked
    from starlette.requests import ClientDisconnect

    stream = request.stream()
    try:
        found = await asyncio.wait_for(_read(stream, most_bytes), seconds)
        if found is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_read(stream, _DRAINED_BYTES, keeps=False), _DRAIN_SECONDS)
            message = f"the body has more than {most_bytes} bytes, the most that this server takes (--max-body)"
            raise ApiError(413, message, headers={"connection": "close"})
        return found
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} s", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise ClientGone from error


async def _read(stream: AsyncIterator[bytes], most_bytes: int, keeps: bool = True) -> bytes | None:
    """Return what comes, or None once it is more than so many bytes."""
    parts, size = [], 0
    async for part in stream:
        size += len(part)
        if size > most_bytes:
            return None
        if keeps:
            parts.append(part)
    return b"".join(parts)


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return what ``work`` gives, which is cancelled when the client goes.

    Raises:
        ClientGone: it went.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer of server-sent events, an ASGI application.

    Args:
        events: JSON objects; the stream ends with ``[DONE]`` unless the last of them is an error.
        end: called when the last was sent, or the client has gone.
        seconds: that a client may take to read an event; one that takes longer is taken to have gone.
        headers: of the answer.
    """

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        end: Callable[[bool], None],
        seconds: float,
        headers: dict[str, str],
    ) -> None:
        self._events, self._end, self._seconds = events, end, seconds
        kept = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.items()]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send all events."""
        is_whole = False
        try:
            await until_gone(receive, self._send(send))
            is_whole = True
        finally:
            self._end(is_whole)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        last: dict[str, Any] = {}
        async for last in self._events:
            text = json.dumps(last, ensure_ascii=False, separators=(",", ":"))
            await self._put(send, f"data: {text}\n\n", True)
        await self._put(send, "" if "error" in last else "data: [DONE]\n\n", False)

    async def _put(self, send: Send, text: str, more: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._seconds, task.cancel)
        try:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        finally:
            timer.cancel()
