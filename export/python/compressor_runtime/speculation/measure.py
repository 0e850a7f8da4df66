"""Time verifications and texts with drafts beside plain steps, and compare the gain with what is predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from compressor_runtime.errors import RequestError
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import speculation
from compressor_runtime.speculation.pace import on_lines

_ROWS, _TURNS = (1, 2, 4, 8, 16), 15


def verification_times(bundle: Any, prompt: Sequence[int]) -> dict[int, float]:
    """Return the seconds of a verification by its rows, and under 0 those of a step, behind a prompt; medians.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle` that verifies.
    """
    session = bundle.session(1, len(prompt) + max(_ROWS))
    session.step([list(prompt)])
    found: dict[int, list[float]] = {rows: [] for rows in (0, *_ROWS)}
    for _ in range(_TURNS):
        for rows, times in found.items():
            session.position = len(prompt)
            begin = time.perf_counter()
            if rows:
                session.verify([prompt[-1]] * rows, range(-1, rows - 1))
                session.accept({0: [0]})
            else:
                session.step([[prompt[-1]]])
            times.append(time.perf_counter() - begin)
    return {rows: median(times) for rows, times in found.items()}


def measure_drafts(
    bundle: Any, kind: str, ids: Sequence[int], prompt_tokens: int, new_tokens: int, texts: int
) -> dict[str, float]:
    """Continue passages of a text greedily, in turns with drafts and without.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle`.
        kind: of the drafts.
        ids: the text.
        prompt_tokens, new_tokens: of each passage.
        texts: passages, spread over the text.
    Returns:
        ``verify_<k>_steps``, the time of verifying k rows in steps; ``acceptance``; ``tokens_per_verification``;
        ``drafted_tokens_per_s``; ``speedup`` over plain steps, and ``predicted_speedup``, from these times and from how
        many rows were verified.
    Raises:
        RequestError: the text is too short, or the bundle has no kernels for these drafts.
    """
    if speculation(bundle, kind) is None:
        raise RequestError(f"speculate={kind!r}: nothing to measure; give {', '.join(map(repr, bundle.speculations))}")
    spare = len(ids) - prompt_tokens
    if spare < 0 or new_tokens < 2:
        raise RequestError(f"a text of {len(ids)} tokens, {new_tokens} new ones: give {prompt_tokens} and at least 2")
    times = verification_times(bundle, ids[:prompt_tokens])
    known = sorted({**times, 1: times[0]}.items())[1:]
    plain_s = drafted_s = 0.0
    plain_tokens = drafted_tokens = 0
    every: list[Speculation] = []
    for number in range(texts):
        begin = spare * number // texts
        prompt = list(ids[begin : begin + prompt_tokens])
        seconds, count = _timed(bundle, prompt, new_tokens, None)
        plain_s, plain_tokens = plain_s + seconds, plain_tokens + count
        every.append(Speculation(kind))
        seconds, count = _timed(bundle, prompt, new_tokens, every[-1])
        drafted_s, drafted_tokens = drafted_s + seconds, drafted_tokens + count
    whole = sum(every[1:], every[0])
    rate = drafted_tokens / drafted_s
    found = {f"verify_{rows}_steps": times[rows] / times[0] for rows in _ROWS}
    found |= {"acceptance": whole.acceptance, "tokens_per_verification": whole.tokens_per_verification}
    found |= {"drafted_tokens_per_s": rate, "speedup": rate / (plain_tokens / plain_s)}
    return found | {"predicted_speedup": whole.predicted_speedup(lambda rows: on_lines(known, rows))}


def _timed(bundle: Any, prompt: list[int], count: int, counts: Speculation | None) -> tuple[float, int]:
    """Return the seconds behind the first token of a text, and how many tokens came in them."""
    tokens = bundle.continued(prompt, count, checked_sampler(0.0, 0, 1.0, 0), [], counts)
    next(tokens, None)
    begin = time.perf_counter()
    came = sum(1 for _ in tokens)
    return time.perf_counter() - begin, came
