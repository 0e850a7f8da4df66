"""Count how deep tokens went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Depth:
    """Counts of the tokens of one text, but those of its prompt.

    Attributes:
        blocks: of the model.
        tokens: that steps have read.
        ran: blocks that they ran, those that ran late included.
        heads: times that norm and head ran.
        late: blocks among ``ran`` that ran for a token when a later one went deeper.
    """

    blocks: int
    tokens: int = 0
    ran: int = 0
    heads: int = 0
    late: int = 0

    @property
    def blocks_per_token(self) -> float:
        """Return the mean number of blocks that a token ran; 0 before there is any."""
        return self.ran / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        """Say how deep tokens went."""
        return (
            f"{self.blocks_per_token:.2f} of {self.blocks} blocks a token, {self.heads / max(1, self.tokens):.2f} heads"
        )

    def facts(self) -> dict[str, Any]:
        """Return all of it, for reports."""
        return {
            "blocks": self.blocks,
            "tokens": self.tokens,
            "blocks_per_token": self.blocks_per_token,
            "heads_per_token": self.heads / self.tokens if self.tokens else 0.0,
            "late_blocks_per_token": self.late / self.tokens if self.tokens else 0.0,
        }
