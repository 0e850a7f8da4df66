"""Describe the heads of an attention kernel on a GPU, and scale its scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T

from compressor.errors import VerificationError

LOWEST = -3.0e38
"""Below all scores; its difference to itself is 0."""
_WIDEST = 512


@dataclass(frozen=True)
class Heads:
    """Heads that attend, and how their rows are read.

    Attributes:
        width: of a head, at most 512.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 means none.
        unit: channels that rows of keys and values give at once, at most.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    softcap: float
    unit: int = 4

    def __post_init__(self) -> None:
        if self.width > _WIDEST:
            raise VerificationError(
                f"attention of heads of {self.width} channels on a GPU: there are kernels for up to {_WIDEST}"
            )

    @cached_property
    def repeat(self) -> int:
        """Return how many heads share a head of keys."""
        return self.heads // self.kv_heads

    @cached_property
    def vec(self) -> int:
        """Return how many channels are read at once."""
        return math.gcd(self.unit, self.width)

    @cached_property
    def columns(self) -> int:
        """Return how many vectors a row has."""
        return self.width // self.vec

    def score(self, product: Any) -> Any:
        """Scale a product of a query and a key, and cap it."""
        return self.cap(product * T.float32(self.scale))

    def cap(self, score: Any) -> Any:
        """Cap a score."""
        return T.float32(self.softcap) * T.tanh(score / T.float32(self.softcap)) if self.softcap else score
