"""Check what a call says of the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, indices, token_ids, whole
from compressor_runtime.errors import RequestError


def tokens_ahead(
    ids: ArrayLike, ahead: ArrayLike, slot: ArrayLike | None, vocab_size: int, batch: int
) -> tuple[NDArray[np.int64], ...]:
    """Return drafted tokens, how many others stand before each, and the sequence of each; all int64 [T].

    Raises:
        RequestError: they are not whole numbers in rows of one length, or out of range.
    """
    tokens, behind = token_ids(np.asarray(ids)[None], vocab_size)[0], array("ahead", ahead)
    slots = np.zeros_like(tokens) if slot is None else indices("slot", slot, batch)
    if not behind.shape == slots.shape == tokens.shape or behind.dtype.kind not in "iu" or behind.min() < 0:
        raise RequestError(f"ahead {behind.tolist()!r:.100}: give a whole number, at least 0, for each token")
    return tokens, behind.astype(np.int64, copy=False), slots


def lengths_up_to(stored: Sequence[int], values: ArrayLike) -> list[int]:
    """Return a length for each sequence.

    Args:
        stored: tokens of each.
    Raises:
        RequestError: they are not whole numbers from 0 to these.
    """
    given = array("lengths", values)
    if given.shape != (len(stored),):
        raise RequestError(f"lengths: {list(given.shape)}; give one for each of the {len(stored)} sequences")
    return [whole("lengths", n, 0, int(most)) for n, most in zip(given.tolist(), stored, strict=True)]


def kept_rows(keep: ArrayLike | None, shape: Sequence[int], batch: int) -> NDArray[Any]:
    """Return which of a step's tokens logits are wanted of, [R]; the last for None.

    Args:
        shape: of the tokens, sequences and tokens of each.
        batch: the sequences that there must be.
    Raises:
        RequestError: there are others, or ``keep`` does not list indices of these tokens.
    """
    sequences, count = shape
    rows = np.array([count - 1]) if keep is None else array("keep", keep)
    inside = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < count
    if sequences != batch or not inside:
        raise RequestError(
            f"ids {list(shape)}, keep {rows.tolist()}: the session's batch is {batch}, and keep must list indices of "
            "these tokens"
        )
    return rows
