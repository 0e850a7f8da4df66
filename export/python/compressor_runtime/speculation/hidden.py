"""Keep the hidden states that heads draft from, and ask the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.arguments import array, token_ids
from compressor_runtime.errors import RequestError

HEADS = "heads"
"""The entry of a library that heads are."""


class Hidden:
    """Hidden states of the last token that the model has read of each of a session's sequences.

    The entry `verify` gives them, and `main` does not: they are known of tokens that were drafted and accepted, and of
    a step behind a request for one, which goes through `verify`.

    Args:
        heads: (hidden [1, T, D], following [1, T]) -> logits [1, T, heads, V]; None where the bundle has no heads.
        vocab_size: tokens of the model.

    Attributes:
        is_wanted: one was asked for since the last step: the next one is to keep it.
    """

    def __init__(self, heads: Callable[..., Any] | None, vocab_size: int) -> None:
        self._heads, self._vocab_size = heads, vocab_size
        self._given: NDArray[np.float32] | None = None  # of the last call, [R, D]
        self._kept: dict[int, NDArray[np.float32]] = {}
        self.is_wanted = False

    def of(self, slot: int = 0) -> NDArray[np.float32] | None:
        """Return the state float32 [D] of a sequence's last token; None if it is not known."""
        self.is_wanted = self._heads is not None
        return self._kept.get(slot)

    def heads(self, states: Any, following: Any) -> NDArray[np.float32]:
        """Return logits float32 [T, heads, V] of further tokens.

        Args:
            states: [T, D].
            following: the token behind each, whole numbers [T].
        Raises:
            RequestError: the bundle has no heads, or these are not states and tokens.
        """
        if self._heads is None:
            raise RequestError("heads: the bundle has none; compress the model with the pass `draft_heads`")
        hidden, tokens = array("states", states), token_ids(np.asarray(following)[None], self._vocab_size)
        if hidden.ndim != 2 or len(hidden) != tokens.shape[1]:
            raise RequestError(f"states {list(hidden.shape)} of {tokens.shape[1]} tokens: give a row for each")
        logits: NDArray[np.float32] = self._heads(np.ascontiguousarray(hidden[None], np.float32), tokens)[0]
        return logits

    def give(self, states: NDArray[np.float32] | None) -> None:
        """Take the states [R, D] of a call; None where it gave none, or not one for each token."""
        self._given = states

    def keep(self, rows: Sequence[tuple[int, int]]) -> None:
        """Keep what was given last for (sequence, row), whose tokens are appended."""
        self.is_wanted = False
        if self._given is not None:
            self._kept |= {sequence: self._given[row].copy() for sequence, row in rows}

    def forget(self) -> None:
        """Forget the states of all sequences."""
        self._kept = {}
