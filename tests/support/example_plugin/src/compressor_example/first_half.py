"""Let a search of architectures halve a feed-forward network, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.search.alternatives.width import Width
from compressor.search.space import Alternative, SubLayer


@dataclass(frozen=True)
class FirstHalf(Width):
    """Keep the more important half of the inner channels, where that is a multiple of the recipe's."""

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative, or why there is none."""
        if argument:
            raise UsageError(f"first_half takes no argument; found {argument!r}")
        return Width.of(layer, "0.5", multiple)
