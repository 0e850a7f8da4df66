"""Draft with the model's own first layers: its norm and head read the residual stream behind them (LayerSkip's exit).

Self-speculative decoding of Elhoushi et al., "LayerSkip" (arXiv:2404.16710), section 4.3: the tokens that are verified
go on from where the draft left them, so that their first layers are computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.kinds.kind import kind_of_chains
from compressor_runtime.speculation.parts import BEGIN, END

REST = "rest"
"""The entry of a library that the layers behind the first ones are."""


class FirstLayers:
    """Draft one text with the first part of its model.

    Args:
        session: a :class:`compressor_runtime.session.Session` with parts.
        slot: the text's sequence.
    """

    def __init__(self, session: Any, slot: int) -> None:
        self._session, self._slot = session, slot

    def step(self, token: int, ahead: int) -> NDArray[np.float32]:
        """Read a token through the first layers, the last norm and the head; return logits [V]."""
        rows = self._session.begin([token], [ahead], [self._slot])
        logits: NDArray[np.float32] = self._session.parts.end(rows, [0])[0]
        return logits


EXIT = kind_of_chains("exit", FirstLayers, (BEGIN, REST, END))
"""Drafts from the model's first layers."""
