"""Leave a sub-layer out: nothing is added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.search.space import Alternative, SubLayer


@dataclass(frozen=True)
class Nothing(Alternative):
    """Leave a sub-layer out."""

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative, or why the sub-layer has to stay."""
        if argument:
            raise UsageError(f"none:{argument}: takes nothing behind its name")
        if layer.is_kept:
            return "it is among those that keep_first and keep_last keep"
        return layer.branch.reason or cls()

    @property
    def label(self) -> str:
        """Name it."""
        return "none"

    @property
    def stays(self) -> bool:
        """Nothing stays."""
        return False
