"""Choose tokens from logits, and turn them into text as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.arguments import real, whole
from compressor_runtime.errors import BundleError


class _Given:
    """Draw one number that is given."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


def choose(
    logits: NDArray[np.float32], generator: np.random.Generator | _Given, temperature: float, top_k: int, top_p: float
) -> int:
    """Return one token id from logits [V]; see :meth:`Bundle.generate` for the arguments.

    Raises:
        BundleError: the logits are not finite.
    """
    if not np.isfinite(logits.max()):
        raise BundleError("the model computed logits that are NaN or infinity; its weights may be damaged")
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a temperature near 0 leaves -infinity for all but the likeliest
        scaled = (logits.astype(np.float64) - logits.max()) / temperature
    tokens = np.arange(len(scaled)) if not 0 < top_k < len(scaled) else np.argpartition(-scaled, top_k - 1)[:top_k]
    if top_p < 1:
        tokens = tokens[np.argsort(-scaled[tokens], kind="stable")]
    weights = np.exp(scaled[tokens])
    sums = np.cumsum(weights)
    if top_p < 1:
        sums = sums[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return int(tokens[min(np.searchsorted(sums, generator.random() * sums[-1], side="right"), len(sums) - 1)])


class Sampler:
    """Choose token after token, with one draw of a random stream each; greedily, with none.

    Args:
        generator: the stream.
        temperature, top_k, top_p: as of :func:`choose`.
    """

    def __init__(self, generator: np.random.Generator, temperature: float, top_k: int, top_p: float) -> None:
        self.temperature = temperature
        self._generator, self._options = generator, (temperature, top_k, top_p)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """Return a token id from logits [V]."""
        return choose(logits, self._generator, *self._options)

    def guess(self, logits: NDArray[np.float32], number: float) -> int:
        """Return the token id that :meth:`pick` would from logits [V], if ``number`` were the next random number."""
        return choose(logits, _Given(number), *self._options)

    def ahead(self, count: int) -> NDArray[np.float64]:
        """Return the uniform numbers [count] of the next draws, which stay to be drawn."""
        return deepcopy(self._generator).random(count)


def checked_sampler(temperature: float, top_k: int, top_p: float, seed: int | None) -> Sampler:
    """Return a sampler for the arguments of :meth:`Bundle.generate`.

    Raises:
        RequestError: one is out of range.
    """
    generator = np.random.default_rng(None if seed is None else whole("seed", seed, 0))
    temperature, top_k = real("temperature", temperature), whole("top_k", top_k, 0)
    return Sampler(generator, temperature, top_k, real("top_p", top_p, above=0, most=1))


def next_tokens(
    step: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    first: NDArray[np.int64],
    pick: Callable[[NDArray[np.float32], bool], int],
    ends: Mapping[int, str],
    count: int,
    why_no_more: Callable[[], str] | None = None,
) -> Generator[int, None, str]:
    """Yield token after token, each read by the next step; the generator's value tells why it ended.

    Args:
        step: tokens [1, S] -> logits [V] of what comes next.
        first: what the first step reads.
        pick: (logits, whether they are the first) -> token.
        ends: tokens that end the text, each with the reason.
        count: at most so many tokens.
        why_no_more: asked behind each step; a reason ends the text there, an empty one does not.
    """
    tokens = first
    for number in range(count):
        logits = step(tokens)
        if why_no_more is not None and (reason := why_no_more()):
            return reason
        token = pick(logits, number == 0)
        if token in ends:
            return ends[token]
        yield token
        tokens = np.array([[token]])
    return "length"


class TextStream:
    """Token ids to text, one at a time; keeps back what a later token could still change."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)  # some tokenizers write a word's space only after another word
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """Append a token and return the text that it completes, possibly none."""
        self._ids.append(token)
        return self._new(whole=False)

    def rest(self) -> str:
        """Return the text that was kept back: at the end of the tokens, also an incomplete character."""
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        before: str = self._tokenizer.decode(self._ids[self._start : self._read])
        known = before.rstrip("\ufffd")
        text: str = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not whole):
            return ""
        if known == before:  # otherwise the prompt ends within a character: do not begin there
            self._start = self._read
        self._read = len(self._ids)
        return text[len(known) :]


@dataclass
class Depth:
    """Counts of the tokens of one text, but those of its prompt.

    Attributes:
        blocks: of the model.
        tokens: that steps have read.
        ran: blocks that they ran, those that ran late included.
        heads: times that norm and head ran.
        late: blocks among ``ran`` that ran for a token when a later one went deeper.
    """

    blocks: int
    tokens: int = 0
    ran: int = 0
    heads: int = 0
    late: int = 0

    @property
    def blocks_per_token(self) -> float:
        """Return the mean number of blocks that a token ran; 0 before there is any."""
        return self.ran / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        """Say how deep tokens went."""
        return (
            f"{self.blocks_per_token:.2f} of {self.blocks} blocks a token, {self.heads / max(1, self.tokens):.2f} heads"
        )

    def facts(self) -> dict[str, Any]:
        """Return all of it, for reports."""
        return {
            "blocks": self.blocks,
            "tokens": self.tokens,
            "blocks_per_token": self.blocks_per_token,
            "heads_per_token": self.heads / self.tokens if self.tokens else 0.0,
            "late_blocks_per_token": self.late / self.tokens if self.tokens else 0.0,
        }


class Generation(Iterator[str]):
    """Iterate over pieces of a text, and tell how far it came.

    Attributes:
        prompt_tokens: tokens of the prompt, a beginning-of-sequence token that stands for an empty one included.
        new_tokens: tokens that were computed so far; an end-of-sequence token, which has no text, is not counted.
        finish_reason: why it ended: "eos_token", "stop_sequence", "given_up" where its confidence stayed low, or
            "length" where it has as many tokens as it may have or the model has no further position; None while it goes
            on.
        speculation: counts and times of drafts, a :class:`~compressor_runtime.speculation.counts.Speculation`; None
            without drafts.
        depth: counts of blocks, a :class:`Depth`, where tokens need not run all; else
            None.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokens: Generator[int, None, str],
        stream: TextStream,
        stops: list[str],
        counts: Any = None,
    ) -> None:
        self.depth = counts if isinstance(counts, Depth) else None
        self.speculation = None if self.depth is not None else counts
        self.prompt_tokens, self.new_tokens = len(prompt), 0
        self.finish_reason: str | None = None
        self._pieces = self._text(tokens, stream, stops)

    def _text(self, tokens: Generator[int, None, str], stream: TextStream, stops: list[str]) -> Iterator[str]:
        if (yield from text_pieces(stream, self._counted(tokens), stops)):
            self.finish_reason = "stop_sequence"

    def _counted(self, tokens: Generator[int, None, str]) -> Iterator[int]:
        while True:
            try:
                token = next(tokens)
            except StopIteration as end:
                self.finish_reason = end.value
                return
            self.new_tokens += 1
            yield token

    def __next__(self) -> str:
        """Return the next piece of text that no later token can change."""
        return next(self._pieces)


class UntilStop:
    """Turn tokens into text up to the first of some stops; keep back any end that could be a stop's beginning.

    Attributes:
        stopped: one of them came.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream, self._stops, self._text = stream, stops, ""
        self.stopped = False

    @property
    def held(self) -> int:
        """Characters that are kept back."""
        return len(self._text)

    def push(self, token: int | None) -> str:
        """Append a token, None for the end, and return the text that is certain by now, possibly none."""
        text = self._text + (self._stream.rest() if token is None else self._stream.push(token))
        cuts = [cut for stop in self._stops if (cut := text.find(stop)) >= 0]
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = min(cuts) if cuts else len(text) - (0 if token is None else max(lengths, default=0))
        self.stopped, self._text = bool(cuts), text[sure:]
        return text[:sure]


def text_pieces(stream: TextStream, tokens: Iterator[int], stops: list[str]) -> Generator[str, None, bool]:
    """Yield the text of ``tokens`` up to the first of ``stops``; see :class:`UntilStop`.

    The generator's own value tells whether one of ``stops`` came.
    """
    until = UntilStop(stream, stops)
    for token in chain(tokens, (None,)):
        if sure := until.push(token):
            yield sure
        if until.stopped:
            return True
    return False
