"""Hold one text that somebody waits for: what it is asked to be, and what has come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.generation import Sampler, TextStream, UntilStop

CANCELLED = "cancelled"
"""Why a text ended that nobody waits for any more."""


@dataclass(frozen=True)
class Score:
    """Tell how likely a token was, among others.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, before temperature.
        likeliest: ids and logarithms of the likeliest tokens, the best first.
        place: characters of the text in front of it.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    place: int


@dataclass
class Piece:
    """A part of a text that is certain.

    Attributes:
        text: may be empty.
        scores: of its tokens, where they are asked for.
        finish_reason: as :class:`~compressor_runtime.generation.Generation` has it, or "cancelled"; None while it goes
            on.
        error: why there will be no more; then the rest says nothing.
    """

    text: str = ""
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """Tell whether no other comes after it."""
        return self.finish_reason is not None or self.error is not None

    def add(self, other: Piece) -> None:
        """Append the piece that comes after this one."""
        self.text += other.text
        self.scores += other.scores
        self.finish_reason, self.error = other.finish_reason, other.error


class Request:
    """A text to be generated.  It is also the sampler of its own tokens.

    Attributes:
        prompt: token ids.
        max_tokens: at most so many new ones.
        temperature: of the sampler.
        ends: tokens that end the text -> why.
        new_tokens: that were chosen, but for one that ended the text.
        last: of these.
        cancelled: nobody waits for it any more; may be set by any thread.
        created, admitted, first, ended: seconds of :func:`time.monotonic`; 0 before.

    Args:
        stream: turns its tokens into text.
        stops: texts that end it.
        alternatives: how many of the likeliest tokens are told with each; None for no scores.
        deliver: called with each piece, by the thread that generates.
        streams: deliver pieces as they come; else all in one, at the end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        stream: TextStream,
        ends: Mapping[int, str],
        deliver: Callable[[Piece], None],
        *,
        stops: Sequence[str] = (),
        alternatives: int | None = None,
        streams: bool = True,
    ) -> None:
        self.prompt, self.max_tokens, self.ends = list(prompt), max_tokens, ends
        self.temperature = sampler.temperature
        self.new_tokens, self.last, self.cancelled = 0, -1, False
        self.created, self.admitted, self.first, self.ended = time.monotonic(), 0.0, 0.0, 0.0
        self._sampler, self._until, self._alternatives = sampler, UntilStop(stream, stops), alternatives
        self._deliver, self._streams = deliver, streams
        self._sent = 0  # characters
        self._logits: NDArray[np.float32] | None = None  # that the last token was chosen from
        self._scores: list[Score] = []  # of tokens whose text is kept back
        self._piece = Piece()

    def pick(self, logits: NDArray[np.float32]) -> int:
        """Return a token id from logits [V]."""
        self._logits = logits if self._alternatives is not None else None
        return self._sampler.pick(logits)

    def add(self, token: int) -> None:
        """Append the token that was picked last, and deliver the text that is certain by now."""
        self.new_tokens += 1
        self.last = token
        if not self.first:
            self.first = time.monotonic()
        if self._alternatives is not None and self._logits is not None:
            self._scores.append(score(self._logits, token, self._alternatives, self._sent + self._until.held))
        text = self._until.push(token)
        if self._until.stopped:
            self._end(text, "stop_sequence")
        elif self.new_tokens >= self.max_tokens:
            self.end("length", text)
        else:
            self._give(text, None)

    def end(self, reason: str, text: str = "") -> None:
        """Deliver the rest of the text, behind ``text``, and why it ended."""
        if not self.ended:
            text += self._until.push(None)
            self._end(text, "stop_sequence" if self._until.stopped else reason)

    def fail(self, error: Exception) -> None:
        """Deliver an error in place of the rest."""
        if not self.ended:
            self.ended = time.monotonic()
            self._deliver(Piece(error=error))

    def _end(self, text: str, reason: str) -> None:
        self.ended = time.monotonic()
        self._give(text, reason)

    def _give(self, text: str, reason: str | None) -> None:
        self._sent += len(text)
        if reason is None and not self._scores and not self._streams:
            self._piece.text += text
            return
        all_of_it = reason is not None and reason != "stop_sequence"
        ready = [found for found in self._scores if all_of_it or found.place < self._sent]
        del self._scores[: len(ready)]  # places only grow
        piece = Piece(text, ready, reason)
        if self._streams and (text or piece.is_last):
            if self._piece.scores:
                self._piece.add(piece)
                piece, self._piece = self._piece, Piece()
            self._deliver(piece)
            return
        self._piece.add(piece)
        if piece.is_last:
            self._deliver(self._piece)


def score(logits: NDArray[np.float32], token: int, alternatives: int, place: int) -> Score:
    """Return how likely a token is by logits [V], and the likeliest ones; of equal ones that with the lower id."""
    wide = logits.astype(np.float64)
    top = wide.max()
    logprobs = wide - (top + np.log(np.exp(wide - top).sum()))
    count = min(alternatives, len(logprobs))
    best = np.argsort(-logprobs, kind="stable")[:count] if count else np.array([], np.int64)
    return Score(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best), place)
