"""Draft with the model's own weights at half their bytes: the upper planes of codes that lie in two.

The library has an entry `planes`, which takes what `verify` does and reads of each such weight the upper four bits of
its codes alone.  Its keys and values lie behind the stored ones until what is verified writes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.kinds.kind import kind_of_chains

NAME = "planes"
"""Of the kind, and of the entry."""


@dataclass(frozen=True)
class UpperPlanes:
    """Step through drafts by the entry that reads upper planes.

    Attributes:
        session: of the model.
    """

    session: Any

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> NDArray[np.float32]:
        """Read a token of each of some texts, behind the stored ones; return logits [R, 1, V] of the next ones."""
        logits: NDArray[np.float32] = self.session.draft(NAME, tokens, ahead, slots)[:, None]
        return logits


PLANES = kind_of_chains(NAME, UpperPlanes, (NAME,))
"""Drafts of the model itself, from the upper planes of its weights."""
