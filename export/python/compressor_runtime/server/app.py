"""The endpoints, and what surrounds each of them: a key, a number in the log, counts."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from compressor_runtime.batching.request import Piece, Request
from compressor_runtime.batching.worker import Busy
from compressor_runtime.errors import RequestError
from compressor_runtime.server.answers import Answer, usage
from compressor_runtime.server.bodies import Asked, AskedEmbeddings, read_chat, read_completion, read_embeddings
from compressor_runtime.server.embeddings import as_told
from compressor_runtime.server.errors import ApiError
from compressor_runtime.server.fields import read_object
from compressor_runtime.server.http import ClientGone, EventStream, Receive, Send, read_body, until_gone
from compressor_runtime.server.metrics import CONTENT_TYPE
from compressor_runtime.server.service import Service

_log = logging.getLogger("compressor.server")
_NUMBER = re.compile(r"[\w.-]{1,64}")
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_MOST_INPUTS = 2048  # texts of a request for embeddings
_GONE = 499  # in the log and the metrics: the client went before its answer


def make_app(service: Service) -> Callable[..., Any]:
    """Return the ASGI application of a service."""
    endpoints = _Endpoints(service)
    routes = {
        "/v1/completions": ("POST", endpoints.completions),
        "/v1/chat/completions": ("POST", endpoints.chat),
        "/v1/embeddings": ("POST", endpoints.embeddings),
        "/v1/models": ("GET", endpoints.models),
        "/v1/models/{name:path}": ("GET", endpoints.model),
        "/health": ("GET", endpoints.health),
        "/metrics": ("GET", endpoints.metrics),
    }
    handlers: Any = {ApiError: _told, HTTPException: _refused, RequestError: _wrong, Exception: _failed}
    app = Starlette(
        routes=[Route(path, call, methods=[method]) for path, (method, call) in routes.items()],
        exception_handlers=handlers,
    )
    return _Frame(app, service, frozenset(routes))


async def _told(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.content, error.status, error.headers)


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    message = (
        f"{method} {path[:100]}: {'give another method' if error.status_code == 405 else 'there is no such endpoint'}"
    )
    return await _told(request, ApiError(error.status_code, message, headers=error.headers))


async def _wrong(request: HttpRequest, error: Exception) -> Response:
    return await _told(request, ApiError(400, str(error)))


async def _failed(request: HttpRequest, _: Exception) -> Response:
    return await _told(request, ApiError(500, "the server failed; its log says more, by this request's number"))


class _Frame:
    """Check who asks, and count, time and log each request under a number."""

    def __init__(self, app: Any, service: Service, paths: frozenset[str]) -> None:
        self._app, self._service, self._paths = app, service, paths
        self._is_local = service.settings.host in ("127.0.0.1", "localhost", "::1")

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        begin, status = time.monotonic(), _GONE
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        number = given if _NUMBER.fullmatch(given) else secrets.token_hex(8)
        counts = scope["state"] = {"number": number, "prompt": 0, "new": 0}

        async def numbered(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, receive, numbered)
        except ApiError as error:
            await JSONResponse(error.content, error.status, error.headers)(scope, receive, numbered)
        except ClientGone:
            status = _GONE
        finally:
            seconds = time.monotonic() - begin
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.answered(path, status)
            if scope["method"] == "POST":
                self._service.metrics.observe("compressor_request_seconds", seconds)
            words = (number, scope["method"], path, status, counts["prompt"], counts["new"], seconds)
            _log.info("%s %s %s %d prompt=%d new=%d %.3f s", *words)

    def _check(self, path: str, headers: dict[str, str]) -> None:
        """Refuse those without the key, and pages of other sites that call this machine by a name of theirs."""
        key = self._service.settings.api_key
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if key is None and self._is_local and host.lower() not in _LOCAL:
            raise ApiError(403, f"host {host!r:.100}: a server without a key answers to {', '.join(_LOCAL)} only")
        if key is None or path == "/health":
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), _bytes(key)):
            known = {"www-authenticate": "Bearer"}
            raise ApiError(
                401, "give the server's key: Authorization: Bearer KEY", code="invalid_api_key", headers=known
            )


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service, self._created = service, int(time.time())

    async def completions(self, request: HttpRequest) -> Any:
        return await self._generate(request, read_completion)

    async def chat(self, request: HttpRequest) -> Any:
        return await self._generate(request, read_chat)

    async def _generate(self, request: HttpRequest, read: Callable[[dict[str, Any]], Asked]) -> Any:
        service, settings = self._service, self._service.settings
        body = await read_body(request, settings.max_body, settings.body_s)
        service.check_generates()

        def prepared() -> tuple[Asked, list[list[int]]]:
            asked = read(read_object(body))
            service.check_model(asked.model)
            return asked, service.prompts_of(asked)

        asked, prompts = await asyncio.to_thread(prepared)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def deliver(index: int, piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, (index, piece))

        requests = service.requests_of(asked, prompts, deliver)
        service.submit(requests)
        answer = Answer(request.state.number, service.model, bool(asked.messages), service.bundle.tokenizer.decode)
        told = _Told(service, requests, sum(map(len, prompts)), request.scope["state"])
        try:
            first = await until_gone(request.receive, queue.get() if asked.streams else _last(queue, len(requests)))
            if not asked.streams:
                pieces = first
                told.end(True)
                return JSONResponse(answer.whole(pieces, told.usage()))
            if first[1].error is not None:
                raise _as_api(first[1].error)
        except BaseException:
            told.end(False)
            raise
        events = _events(first, queue, answer, told, asked.tells_usage)
        return EventStream(events, told.end, settings.send_s, {"x-accel-buffering": "no"})

    async def embeddings(self, request: HttpRequest) -> Response:
        service, settings = self._service, self._service.settings
        body = await read_body(request, settings.max_body, settings.body_s)
        if service.embedder is None:
            raise ApiError(400, f"{service.model} generates text, and embeds none", "model")

        def prepared() -> tuple[AskedEmbeddings, list[list[int]]]:
            asked = read_embeddings(read_object(body), _MOST_INPUTS)
            service.check_model(asked.model)
            tokenizer = service.bundle.tokenizer
            rows = [tokenizer.encode(x).ids if isinstance(x, str) else x for x in asked.inputs]
            if not all(rows):
                raise ApiError(400, "input: a text without tokens", "input", "invalid_value")
            return asked, [service.checked(ids, "input") for ids in rows]

        asked, rows = await asyncio.to_thread(prepared)
        vectors = await until_gone(request.receive, service.embed(rows))
        if asked.dimensions not in (None, len(vectors[0])):
            words = f"dimensions: this model's embeddings have {len(vectors[0])}, and are not shortened; leave it out"
            raise ApiError(400, words, "dimensions", "invalid_value")
        count = sum(map(len, rows))
        service.metrics.add("compressor_prompt_tokens_total", count)
        request.scope["state"]["prompt"] = count
        data = [
            {"object": "embedding", "index": index, "embedding": as_told(vector, asked.is_base64)}
            for index, vector in enumerate(vectors)
        ]
        counts = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": service.model, "usage": counts})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self._service.model, "object": "model", "created": self._created, "owned_by": "compressor"}

    async def health(self, _: HttpRequest) -> Response:
        is_well = self._service.is_well
        return JSONResponse({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return PlainTextResponse(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})


class _Told:
    """Counts of a request's texts, told once, at their end."""

    def __init__(self, service: Service, requests: Sequence[Request], prompt: int, state: dict[str, Any]) -> None:
        self._service, self._requests, self._prompt, self._state = service, requests, prompt, state
        self._is_told = False

    def usage(self) -> dict[str, int]:
        """Return the tokens so far."""
        return usage(self._prompt, sum(request.new_tokens for request in self._requests))

    def end(self, is_whole: bool) -> None:
        """Free what the texts hold, and count them."""
        if not self._is_told:
            self._is_told = True
            self._service.ended(self._requests, is_whole)
            counts = self.usage()
            self._state |= {"prompt": counts["prompt_tokens"], "new": counts["completion_tokens"]}


async def _last(queue: asyncio.Queue[tuple[int, Piece]], count: int) -> Any:
    """Return the pieces of so many texts, each of which comes in one."""
    found: dict[int, Piece] = {}
    while len(found) < count:
        index, piece = await queue.get()
        if piece.error is not None:
            raise _as_api(piece.error)
        found[index] = piece
    return [found[index] for index in range(count)]


async def _events(
    first: tuple[int, Piece], queue: asyncio.Queue[tuple[int, Piece]], answer: Answer, told: _Told, tells_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of a stream; pieces of a text that came meanwhile are one part."""
    left, came = len(told._requests), [first]
    while True:
        while not queue.empty():
            came.append(queue.get_nowait())
        merged: dict[int, Piece] = {}
        for index, piece in came:
            if index in merged:
                merged[index].add(piece)
            else:
                merged[index] = piece
        for index, piece in merged.items():
            if piece.error is not None:
                yield _as_api(piece.error).content
                return
            yield answer.chunk(index, piece, tells_usage)
            left -= piece.is_last
        if not left:
            break
        came = [await queue.get()]
    if tells_usage:
        yield answer.usage(told.usage())


def _as_api(error: Exception) -> ApiError:
    """Return the answer to an error that ended a text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(503, str(error), code="stopping")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, "the model failed; the server's log says more")
