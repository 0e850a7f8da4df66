"""Draft with the model's own first layers: its norm and head read the residual stream behind them (LayerSkip's exit).

Self-speculative decoding of Elhoushi et al., "LayerSkip" (arXiv:2404.16710), section 4.3: the tokens that are verified
go on from where the draft left them, so that their first layers are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.kinds.kind import kind_of_chains
from compressor_runtime.speculation.parts import BEGIN, END

REST = "rest"
"""The entry of a library that the layers behind the first ones are."""


@dataclass(frozen=True)
class FirstLayers:
    """Draft with the first part of the model.

    Attributes:
        session: a :class:`compressor_runtime.session.Session` with parts.
    """

    session: Any

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """Read a token of each of some texts through the first layers, the last norm and the head; logits [R, 1, V]."""
        rows = self.session.begin(tokens, ahead, slots)
        logits: NDArray[np.float32] = self.session.parts.end(rows, np.arange(len(tokens)))[:, None]
        return logits


EXIT = kind_of_chains("exit", FirstLayers, (BEGIN, REST, END))
"""Drafts from the model's first layers."""
