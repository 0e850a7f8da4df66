"""Decode requests in turns, each in a session of its own: for models whose batch does not take them row by row."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from compressor_runtime.batching.request import Request
from compressor_runtime.depth.tokens import counts_of
from compressor_runtime.errors import BundleError


class Turns:
    """Requests of a model that generates, a token each in turn.

    Args:
        bundle: a :class:`~compressor_runtime.bundle.Bundle`.
        batch: requests at once.
    """

    def __init__(self, bundle: Any, batch: int) -> None:
        self._bundle, self._batch = bundle, batch
        self.reset()

    @property
    def free(self) -> int:
        """Requests that may be added."""
        return self._batch - len(self._tokens)

    @property
    def requests(self) -> list[Request]:
        """Those that were added and have neither ended nor been dropped."""
        return [request for request, _ in self._tokens]

    def reset(self) -> None:
        """Forget all requests."""
        self._tokens: list[tuple[Request, Generator[int, None, str]]] = []

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            RequestError: this machine's memory cannot hold its keys and values.
        """
        counts = counts_of(self._bundle, "off", request.temperature)
        sampler: Any = request  # picks like one
        tokens = self._bundle.continued(request.prompt, request.max_tokens, sampler, [], counts)
        self._tokens.append((request, tokens))

    def drop(self, request: Request) -> None:
        """Forget a request."""
        self._tokens = [one for one in self._tokens if one[0] is not request]

    def round(self) -> None:
        """Give each request a token; the first turn reads its prompt."""
        for request, tokens in [*self._tokens]:
            try:
                request.add(next(tokens))
            except StopIteration as end:
                request.end(end.value)
            except BundleError as error:
                request.fail(error)
            if request.ended:
                self.drop(request)
