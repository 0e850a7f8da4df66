"""Draft with the model's own weights at half their bytes: the upper planes of codes that lie in two.

The library has an entry `planes`, which takes what `verify` does and reads of each such weight the upper four bits of
its codes alone.  Its keys and values lie behind the stored ones until what is verified writes over them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.speculation.kinds.kind import kind_of_chains

NAME = "planes"
"""Of the kind, and of the entry."""


class UpperPlanes:
    """Step through a draft of one sequence by the entry that reads upper planes, or another that reads less.

    Args:
        session: of the model.
        slot: number of the sequence in it.
        entry: that steps.
    """

    def __init__(self, session: Any, slot: int, entry: str = NAME) -> None:
        self._session, self._slot, self._entry = session, slot, entry

    def step(self, token: int, ahead: int) -> NDArray[np.float32]:
        """Read a token ``ahead`` places behind the stored ones; return logits [V] of what comes after it."""
        logits: NDArray[np.float32] = self._session.draft(self._entry, [token], [ahead], [self._slot])[0]
        return logits


PLANES = kind_of_chains(NAME, UpperPlanes, (NAME,))
"""Drafts of the model itself, from the upper planes of its weights."""
