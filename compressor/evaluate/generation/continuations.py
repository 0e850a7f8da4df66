"""Compare greedy continuations of a text's prompts with the dense model's, and count what they repeat.

Perplexity gives a model the right tokens; here it reads its own, as it will where it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.generation.greedy import continue_greedily
from compressor.evaluate.mean import Mean
from compressor.evaluate.quality import GraphLogits
from compressor.graph.caches import empty_past
from compressor.graph.model import ModelInfo
from compressor.progress import Reporter, Silent
from compressor.recipe.data_spec import PROMPT_TOKENS

NEW_TOKENS = 64
"""Tokens of a continuation, where the model has as many positions."""
_GRAM = 4
TOGETHER = 32
"""Prompts that are continued at once."""

Continue: TypeAlias = Callable[[NDArray[np.int64], int], NDArray[np.int64]]
"""prompts [B, S], and a number -> that many tokens more of each, [B, number]."""


def agreement(ours: NDArray[np.int64], dense: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of each continuation's tokens in front of the first that is not the dense model's, [B].

    Args:
        ours, dense: int64 [B, count].
    """
    shares: NDArray[np.float64] = np.cumprod(ours == dense, axis=1).mean(1)
    return shares


def repetition(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of each continuation's 4-grams that were in it before, [B]: ``seq-rep-4``.

    1 - distinct / all, of Welleck et al. 2020, arXiv 1908.04319, section 6.

    Args:
        tokens: int64 [B, count], count >= 4.
    """
    grams = np.lib.stride_tricks.sliding_window_view(tokens, _GRAM, axis=1)
    return np.array([1 - len(np.unique(row, axis=0)) / len(row) for row in grams])


def new_tokens(positions: int, reporter: Reporter | None = None) -> int:
    """Return how long continuations are: 64 tokens, or what a model's positions leave behind a prompt.

    Args:
        positions: 0 where the model has no limit; else 35 at least.
    """
    count = NEW_TOKENS if not positions else min(NEW_TOKENS, positions + 1 - PROMPT_TOKENS)
    if count < NEW_TOKENS and reporter is not None:
        reporter.note(f"evaluation: continuations of {count} tokens, which the model's positions leave")
    return count


def prompts_of(tokens: Tensor, count: int) -> NDArray[np.int64]:
    """Return prompts at even distances in a text, int64 [count, 32].

    Args:
        tokens: int64 [n], n >= 32 count.
    """
    begins = np.arange(count) * (len(tokens) // count)
    found: NDArray[np.int64] = tokens.numpy()[begins[:, None] + np.arange(PROMPT_TOKENS)]
    return found


def measure_continuations(
    result: EvalResult,
    ours: Continue,
    tokens: Tensor,
    prompts: int | None,
    positions: int,
    *,
    dense: GraphLogits | None = None,
    reporter: Reporter | None = None,
) -> EvalResult:
    """Add what a decoder's greedy continuations are like to what else was measured.

    Args:
        ours, dense: the model, and the one to compare it with, run in PyTorch.
        tokens: int64 [n], the evaluation's text.
        prompts: how many to take of it; None measures nothing.
        positions: of the model, as for :func:`new_tokens`.
    """
    if prompts is None:
        return result
    theirs = None if dense is None else graph_continued(dense)
    count, given = new_tokens(positions, reporter), prompts_of(tokens, prompts)
    agreed, repeated, dense_repeated = Mean(), Mean(), Mean()
    with (reporter or Silent()).task("continuations", prompts) as task:
        for part in np.array_split(given, -(-prompts // TOGETHER)):
            found = ours(part, count)
            repeated.add(torch.from_numpy(repetition(found)))
            if theirs is not None:
                wanted = theirs(part, count)
                agreed.add(torch.from_numpy(agreement(found, wanted)))
                dense_repeated.add(torch.from_numpy(repetition(wanted)))
            task.advance(len(part))
    intervals = {"repetition": _within(repeated.interval)}
    result = dataclasses.replace(result, repetition=repeated.mean, continuations=prompts, continuation_tokens=count)
    if theirs is not None:
        intervals["continuation_agreement"] = _within(agreed.interval)
        result = dataclasses.replace(result, continuation_agreement=agreed.mean, dense_repetition=dense_repeated.mean)
    return dataclasses.replace(result, intervals={**result.intervals, **intervals})


def _within(ends: tuple[float, float]) -> tuple[float, float]:
    """Cut an interval of a mean of shares off at 0 and 1."""
    return max(0.0, ends[0]), min(1.0, ends[1])


def graph_continued(model: GraphLogits) -> Continue:
    """Return a function that continues prompts by a captured decoder in PyTorch, step by step through its caches."""
    info: ModelInfo = model.graph.meta["model"]

    def continued(prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        past: list[list[Tensor]] = [[cache[:, :, :0] for cache in kept] for kept in empty_past(info, len(prompts))[:2]]
        states: list[Tensor] = empty_past(info, len(prompts))[2] if info.states else []
        seen = 0

        @torch.no_grad()
        def step(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
            nonlocal past, states, seen
            position, last = torch.arange(seen, seen + tokens.shape[1]), torch.tensor([tokens.shape[1] - 1])
            more = [states] if info.states else []
            logits, keys, values, *new = model.run(torch.as_tensor(tokens), position, last, *past, *more)
            past = [
                [torch.cat(pair, 2) for pair in zip(old, rows, strict=True)]
                for old, rows in zip(past, (keys, values), strict=True)
            ]
            states, seen = (new[0] if new else []), seen + tokens.shape[1]
            return logits[:, -1].numpy()  # type: ignore[no-any-return]

        return continue_greedily(step, prompts, count)

    return continued
