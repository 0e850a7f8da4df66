"""Choose token after token by steps whose depth is counted, and end texts that are given up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.depth.early import EarlyExits
from compressor_runtime.depth.prompts import read_prompt
from compressor_runtime.depth.stages import Stages
from compressor_runtime.generation import Depth, next_tokens
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import speculation

GIVEN_UP = "given_up"
"""Why a text ended whose confidence stayed low."""


def counts_of(bundle: Any, speculate: str | None, temperature: float) -> Speculation | Depth | None:
    """Return the counts of a generation that begins: of drafts, or of blocks; None where nothing is to be counted.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle`.
        speculate, temperature: as of its ``generate``.  Drafts are verified by the whole model, so that no token leaves
            early.
    """
    drafts, model = speculation(bundle, speculate, temperature), bundle.model
    if drafts is not None or "parts" not in model:
        return drafts
    if model.get("depths") is not None:
        return Depth(len(model["depths"]))
    return Depth(int(model["exits"]["of"])) if bundle.leaves_early else None


def counted_tokens(
    session: Any,
    model: Mapping[str, Any],
    first: NDArray[np.int64],
    pick: Callable[[NDArray[np.float32], bool], int],
    ends: Mapping[int, str],
    count: int,
    depth: Depth | None,
) -> Generator[int, None, str]:
    """Yield as :func:`~compressor_runtime.generation.next_tokens` does.

    Args:
        session: new, of one sequence.
        model: facts of the manifest.
        depth: counts, of a model whose tokens need not run all blocks.
    """
    if depth is None or "exits" not in model:
        if session.falling is not None:
            session.falling.depth = depth
        return next_tokens(lambda step: read_prompt(session, step)[0, -1], first, pick, ends, count)
    steps = early_steps(session, model, depth)

    def step(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        return steps.prompt(tokens) if tokens is first else steps.step(int(tokens[0, 0]))

    return next_tokens(step, first, pick, ends, count, lambda: GIVEN_UP if steps.is_hopeless else "")


def early_steps(session: Any, model: Mapping[str, Any], depth: Depth) -> EarlyExits:
    """Return the steps of a session of one sequence whose tokens leave early; they add to some counts."""
    stages, prompt = Stages(session.parts), lambda ids: session.step(ids)[0, -1]
    return EarlyExits(stages, model["exits"], prompt, lambda count: int(session.advance(count)[0]), depth)
