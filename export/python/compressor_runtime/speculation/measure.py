"""Time verifications and texts with drafts beside plain steps, and compare the gain with what is predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from compressor_runtime.errors import RequestError
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import speculation
from compressor_runtime.speculation.kinds.skips import CHAIN, through
from compressor_runtime.speculation.pace import on_lines

_ROWS, _TURNS = (1, 2, 4, 8, 16), 15
_READ_BEFORE = 16  # tokens of a text that are read before its first draft


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


def part_times(bundle: Any, prompt: Sequence[int]) -> list[float]:
    """Return the seconds of each of a bundle's parts for one token behind a prompt, first and last included; medians.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle` with parts.
    """
    session = bundle.session(1, len(prompt) + 1)
    session.step([list(prompt)])
    parts, found = session.parts, list[list[float]]()
    for _ in range(_TURNS):
        times = [time.perf_counter()]
        rows = session.begin([prompt[-1]], [0])
        parts.forget()
        times.append(time.perf_counter())
        for index in range(parts.count):
            parts.run(rows, index)
            times.append(time.perf_counter())
        parts.end(rows, [0])
        times.append(time.perf_counter())
        found.append([after - before for before, after in pairwise(times)])
    return [median(times) for times in zip(*found, strict=True)]


def agreements(bundle: Any, ids: ArrayLike, without: Sequence[Sequence[str]]) -> list[float]:
    """Return, of each choice of parts that are left out, how often its likeliest token is the whole model's.

    A choice drafts as in a generation, up to eight tokens behind what the whole model has read; these are the text's
    own, since a drafted token counts only where those before it are right.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle` with parts.
        ids: texts, whole numbers [N, S], S at least 24.
        without: names of the parts that each choice leaves out.
    """
    texts = np.asarray(ids)
    right, count = np.zeros(len(without), np.int64), 0
    for text in texts:
        session = bundle.session(1, len(text))
        names = session.parts.names
        session.step([text[:_READ_BEFORE]])
        for begin in range(_READ_BEFORE, len(text) - CHAIN + 1, CHAIN):
            chain = text[begin : begin + CHAIN]
            drafted = []
            for gone in without:
                kept = [index for index, name in enumerate(names) if name not in gone]
                drafted.append(through(session, chain, np.arange(CHAIN), np.zeros(CHAIN, np.int64), kept).argmax(1))
            own = session.step([chain], keep=np.arange(CHAIN))[0].argmax(1)
            right += (np.array(drafted) == own).sum(1)
            count += CHAIN
    return [int(one) / count for one in right]


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
        many rows were verified; of lossy drafts also ``tolerance`` and what :func:`fidelity` finds.
    Raises:
        RequestError: the text is too short, or the bundle has no kernels for these drafts.
    """
    if (empty := speculation(bundle, kind)) is None:
        raise RequestError(f"speculate={kind!r}: nothing to measure; give {', '.join(map(repr, bundle.speculations))}")
    spare = len(ids) - prompt_tokens
    if spare < 0 or new_tokens < 2:
        raise RequestError(f"a text of {len(ids)} tokens, {new_tokens} new ones: give {prompt_tokens} and at least 2")
    times = verification_times(bundle, ids[:prompt_tokens])
    known = sorted({**times, 1: times[0]}.items())[1:]
    plain_s = drafted_s = 0.0
    prompts, plain, drafted = list[list[int]](), list[list[int]](), list[list[int]]()
    every: list[Speculation] = []
    for number in range(texts):
        begin = spare * number // texts
        prompts.append(list(ids[begin : begin + prompt_tokens]))
        seconds, tokens = _timed(bundle, prompts[-1], new_tokens, None)
        plain_s += seconds
        plain.append(tokens)
        every.append(Speculation(kind, empty.lossy))
        seconds, tokens = _timed(bundle, prompts[-1], new_tokens, every[-1])
        drafted_s += seconds
        drafted.append(tokens)
    whole = sum(every[1:], every[0])
    rate, plain_rate = (sum(len(one) - 1 for one in found) / s for found, s in ((drafted, drafted_s), (plain, plain_s)))
    found = {f"verify_{rows}_steps": times[rows] / times[0] for rows in _ROWS}
    found |= {"acceptance": whole.acceptance, "tokens_per_verification": whole.tokens_per_verification}
    found |= {"drafted_tokens_per_s": rate, "speedup": rate / plain_rate}
    if empty.lossy is not None:
        found |= {"tolerance": empty.lossy["tolerance"], **fidelity(bundle, prompts, drafted, plain)}
    return found | {"predicted_speedup": whole.predicted_speedup(lambda rows: on_lines(known, rows))}


def fidelity(
    bundle: Any, prompts: Sequence[Sequence[int]], lossy: Sequence[Sequence[int]], lossless: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Compare lossy texts with those of the same prompts without tolerance.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle`.
        prompts: token ids, at least one each.
        lossy, lossless: the tokens that continue each.
    Returns:
        ``lossless_agreement``, the mean share of a text's tokens in front of the first that differs; and
        ``lossy_perplexity`` and ``lossless_perplexity``, of the texts' tokens by the bundle's model, exp of the mean
        negative log-likelihood.
    """
    shares = []
    for ours, own in zip(lossy, lossless, strict=True):
        alike = next((place for place, pair in enumerate(zip(ours, own, strict=False)) if pair[0] != pair[1]), None)
        shares.append(1.0 if ours == own else (min(len(ours), len(own)) if alike is None else alike) / len(own or ours))
    found = {"lossless_agreement": sum(shares) / len(shares)}
    for name, texts in (("lossy_perplexity", lossy), ("lossless_perplexity", lossless)):
        surprise, count = 0.0, 0
        for prompt, text in zip(prompts, texts, strict=True):
            if text:
                read = [*prompt, *text[:-1]]
                session, keep = bundle.session(1, len(read)), np.arange(len(prompt) - 1, len(read))
                logits = session.step([read], keep=keep)[0].astype(np.float64)
                logits -= logits.max(1, keepdims=True)
                surprise += float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(text)), list(text)]).sum())
                count += len(text)
        found[name] = math.exp(surprise / count) if count else 1.0
    return found


def lossy_texts(bundle: Any, prompts: Sequence[Sequence[int]], count: int) -> dict[str, float]:
    """Continue prompts greedily with a bundle's lossy drafts and without; return what :func:`fidelity` finds.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle` whose manifest states a tolerance.
        prompts: token ids, at least one each.
        count: new tokens of each, at most.
    """
    kind = bundle.model["speculate"]
    lossy = [list(bundle.generate_ids(prompt, max_tokens=count, speculate=kind)) for prompt in prompts]
    lossless = [list(bundle.generate_ids(prompt, max_tokens=count, speculate="off")) for prompt in prompts]
    return fidelity(bundle, prompts, lossy, lossless)


def _timed(bundle: Any, prompt: list[int], count: int, counts: Speculation | None) -> tuple[float, list[int]]:
    """Return the seconds behind the first token of a text, and all its tokens."""
    tokens = bundle.continued(prompt, count, checked_sampler(0.0, 0, 1.0, 0), [], counts)
    found = list(islice(tokens, 1))
    begin = time.perf_counter()
    found += tokens
    return time.perf_counter() - begin, found
