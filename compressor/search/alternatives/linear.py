"""Put one linear in the place of a sub-layer, behind its first norm: it starts as the least squares map."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.search.space import Alternative, SubLayer


@dataclass(frozen=True)
class Linear(Alternative):
    """Map the sub-layer's normed input to what it adds to the residual stream, by one linear with a bias."""

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative, or why no linear can stand there."""
        if argument:
            raise UsageError(f"linear:{argument}: takes nothing behind its name")
        if layer.is_kept:
            return "it is among those that keep_first and keep_last keep"
        return layer.mapped if isinstance(layer.mapped, str) else cls()

    @property
    def label(self) -> str:
        """Name it."""
        return "linear"

    @property
    def is_linear(self) -> bool:
        """One linear stands for all of it."""
        return True
