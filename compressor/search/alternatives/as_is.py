"""Leave a sub-layer as it is."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.search.space import AS_IS, Alternative, SubLayer


@dataclass(frozen=True)
class AsIs(Alternative):
    """Leave a sub-layer as it is."""

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative, which every sub-layer has."""
        if argument:
            raise UsageError(f"{AS_IS}:{argument}: takes nothing behind its name")
        return cls()

    @property
    def label(self) -> str:
        """Name it."""
        return AS_IS
