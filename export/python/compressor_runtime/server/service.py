"""Turn what clients ask for into requests of the batch, on the way to a bundle that is loaded once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.arguments import prompt_ids, token_ids
from compressor_runtime.batching.request import Piece, Request
from compressor_runtime.batching.worker import Busy, Worker, decoder_of
from compressor_runtime.errors import RequestError
from compressor_runtime.generation import TextStream, checked_sampler
from compressor_runtime.manifest import GENERATING
from compressor_runtime.server.bodies import Asked
from compressor_runtime.server.chat import ChatTemplate
from compressor_runtime.server.embeddings import Embedder
from compressor_runtime.server.errors import ApiError
from compressor_runtime.server.metrics import Metrics, resident_bytes

_LONGEST_RETRY_SECONDS = 60


@dataclass(frozen=True)
class Settings:
    """State how a bundle is served.

    Attributes:
        host, port: to listen on; port 0 takes any that is free.
        batch: requests at once.
        queue: requests that wait for a place in the batch; more are refused with 429.
        context: most tokens of a prompt with its continuation; None for as many as the model has positions.
        api_key: that clients must know; None for none.
        name: of the model; None takes the manifest's.
        pooling: of an encoder; None takes the manifest's.
        max_body: bytes of a request.
        grace_s: seconds that requests have to end when the server is stopped.
        head_s, body_s: seconds that a request's head and body may take.
        send_s: seconds that a client may take to read a part of a stream.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    batch: int = 8
    queue: int = 64
    context: int | None = None
    api_key: str | None = None
    name: str | None = None
    pooling: str | None = None
    max_body: int = 2 << 20
    grace_s: float = 10
    head_s: float = 10.0
    body_s: float = 30.0
    send_s: float = 30.0


class Service:
    """A bundle that is served.

    Attributes:
        model: its name.
        worker: gives requests their tokens; None for an encoder.
        embedder: embeds texts; None for a model that generates.
    """

    def __init__(self, bundle: Any, settings: Settings) -> None:
        self.bundle, self.settings = bundle, settings
        self.model = settings.name or str(bundle.model.get("name") or bundle.path.resolve().name)
        self.worker: Worker | None = None
        self.embedder: Embedder | None = None
        if bundle.kind == "encoder":
            self.embedder = Embedder(bundle, settings.pooling)
        elif bundle.kind in GENERATING and bundle.model.get("encoder_source", {}).get("reads", "tokens") == "tokens":
            self.worker = Worker(decoder_of(bundle, settings.batch), settings.queue)
        else:
            raise RequestError(
                f"{bundle.path}: holds a {bundle.kind} that reads no text; there is no API to serve it by"
            )
        self.context = min(bundle.limit, settings.context or bundle.limit)
        self.template = ChatTemplate(bundle.path, bundle.manifest["files"])
        bundle.tokenizer.encode("")  # a bundle without one is refused before it is served
        self.is_stopping = False
        self._embedding = ThreadPoolExecutor(1, "compressor-embed")
        self._embeds = 0  # requests that wait for their embeddings
        self._seconds = 1.0  # that a text took, on average, of late
        self.metrics = Metrics(
            {
                "compressor_queue_length": ("Texts that wait for a place in the batch.", lambda: self.waiting),
                "compressor_running": ("Texts in the batch.", lambda: self.worker.running if self.worker else 0),
                "compressor_batch_size": ("Places in the batch.", lambda: settings.batch),
                "process_resident_memory_bytes": ("Memory that the process holds.", resident_bytes),
            }
        )

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.worker.waiting if self.worker is not None else self._embeds

    @property
    def is_well(self) -> bool:
        """Tell whether requests are served."""
        return not self.is_stopping and (self.worker is None or self.worker.is_alive)

    def check_model(self, name: str) -> None:
        """Raise an ApiError unless ``name`` is the model that is served."""
        if name != self.model:
            raise ApiError(404, f"model {name!r:.100}: this server has {self.model}", "model", "model_not_found")

    def check_generates(self) -> None:
        """Raise an ApiError if the model is an encoder."""
        if self.worker is None:
            raise ApiError(400, f"{self.model} is an encoder: it embeds texts, and continues none", "model")

    def prompts_of(self, asked: Asked) -> list[list[int]]:
        """Return token ids of what is to be continued.

        Raises:
            ApiError: the model cannot read it.
        """
        tokenizer = self.bundle.tokenizer
        if asked.messages:
            text = self.template.render(asked.messages)
            # The template writes the tokens that begin a sequence itself.
            return [self.checked(tokenizer.encode(text, add_special_tokens=False).ids, "messages")]
        bos_id = self.bundle.model.get("bos_id")
        try:
            found = [prompt_ids(prompt, lambda text: tokenizer.encode(text).ids, bos_id) for prompt in asked.prompts]
        except RequestError as error:
            raise ApiError(400, str(error), "prompt") from error
        return [self.checked(ids, "prompt") for ids in found]

    def checked(self, ids: list[int], name: str) -> list[int]:
        """Return token ids that the model can read.

        Raises:
            ApiError: they are too many, none, or not the model's.
        """
        if len(ids) > self.context:
            message = f"{name}: {len(ids)} tokens; this server reads at most {self.context}"
            raise ApiError(400, message, name, "context_length_exceeded")
        try:
            token_ids([ids], self.bundle.model["vocab_size"])
        except RequestError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_value") from error
        return ids

    def requests_of(
        self, asked: Asked, prompts: Sequence[list[int]], deliver: Callable[[int, Piece], None]
    ) -> list[Request]:
        """Return a request for each choice: those of the first prompt, then those of the next.

        Args:
            deliver: called with the number of a choice and its pieces, by the thread that generates.
        """
        found: list[Request] = []
        bundle, ends = self.bundle, dict.fromkeys(self.bundle.model["eos_ids"], "eos_token")
        for prompt in prompts:
            is_decoder = bundle.kind == "decoder"
            before = prompt if is_decoder else bundle.model["encoder_source"]["start_ids"]
            room = self.context + 1 - len(before)  # nothing follows the last token
            for n in range(asked.n):
                seed = None if asked.seed is None else (asked.seed + n) % (1 << 64)
                number = len(found)
                request = Request(
                    prompt,
                    min(room, asked.max_tokens or room),
                    checked_sampler(asked.temperature, asked.top_k, asked.top_p, seed),
                    TextStream(bundle.tokenizer, before),
                    ends,
                    lambda piece, number=number: deliver(number, piece),  # type: ignore[misc]
                    stops=asked.stop,
                    alternatives=asked.alternatives,
                    streams=asked.streams,
                )
                found.append(request)
        return found

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue.

        Raises:
            ApiError: it is full, or the server stops.
        """
        assert self.worker is not None
        try:
            self.worker.submit(requests)
        except Busy as error:
            raise self.refusal(str(error)) from error

    def refusal(self, why: str) -> ApiError:
        """Return the error of a request that cannot be taken now, with the seconds after which it may be."""
        if self.is_stopping:
            return ApiError(503, why, code="stopping", headers={"retry-after": "5"})
        seconds = math.ceil(self._seconds * (1 + self.waiting / self.settings.batch))
        wait = str(min(_LONGEST_RETRY_SECONDS, max(1, seconds)))
        return ApiError(429, f"{why}; try again in {wait} s", code="queue_full", headers={"retry-after": wait})

    def ended(self, requests: Sequence[Request], is_whole: bool) -> None:
        """Free what requests hold, and count them.

        Args:
            is_whole: the client has read the answer.
        """
        assert self.worker is not None
        left = [request for request in requests if not request.ended]
        self.worker.cancel(left)
        metrics = self.metrics
        if not is_whole:
            metrics.add("compressor_cancelled_total", 1)
        for request in requests:
            metrics.add("compressor_generated_tokens_total", request.new_tokens)
            if request.first:
                metrics.add("compressor_prompt_tokens_total", len(request.prompt))
                metrics.observe("compressor_queue_seconds", request.admitted - request.created)
                metrics.observe("compressor_first_token_seconds", request.first - request.created)
            if request.ended and request not in left and request.admitted:
                self._seconds += 0.1 * (request.ended - request.admitted - self._seconds)
                if request.new_tokens > 1:
                    each = (request.ended - request.first) / (request.new_tokens - 1)
                    metrics.observe("compressor_token_seconds", each)

    async def embed(self, rows: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        """Return embeddings of rows of token ids; one request's after another's.

        Raises:
            ApiError: too many requests wait.
        """
        assert self.embedder is not None
        if self._embeds >= self.settings.queue:
            raise self.refusal(f"{self._embeds} requests wait already, of at most {self.settings.queue}")
        self._embeds += 1
        is_wanted = [True]
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._embedding, self.embedder.embed, rows, lambda: is_wanted[0])
        finally:
            is_wanted[0] = False
            self._embeds -= 1

    async def drain(self) -> None:
        """Take no more requests, let the others end within the time they have, and fail those left then."""
        self.is_stopping = True
        if self.worker is not None:
            await asyncio.to_thread(self.worker.close, self.settings.grace_s)
        self._embedding.shutdown(wait=False)
