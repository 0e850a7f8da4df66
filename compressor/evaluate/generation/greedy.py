"""Continue prompts by the likeliest tokens.  Needs no torch: processes that run bundles import it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Step = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Append tokens [B, S] to all sequences -> logits of the last, float32 [B, V]."""


def continue_greedily(step: Step, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the ``count`` likeliest next tokens of each prompt, int64 [B, count].

    Of equally likely ones the first is taken.  No token ends a sequence, so that all have as many.

    Args:
        prompts: int64 [B, S].
    """
    found = np.empty((len(prompts), count), np.int64)
    tokens = prompts
    for place in range(count):
        found[:, place] = step(tokens).argmax(-1)
        tokens = found[:, place : place + 1]
    return found
