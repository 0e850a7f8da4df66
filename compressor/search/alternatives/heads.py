"""Keep a share of an attention's query heads, the most important ones, as many in each group that shares keys."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.search.space import Alternative, SubLayer, share_of


@dataclass(frozen=True)
class Heads(Alternative):
    """Keep some query heads; keys, values and caches stay.

    Attributes:
        left: query heads that stay.
    """

    left: int

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative for a share of each group's heads, such as ``0.5``, or why there is none."""
        share = share_of("heads", argument, "query heads")
        cut = layer.cuts.get("query_heads")
        if cut is None:
            return "it has no groups of query heads that can lose some"
        size = cut.family.count // cut.runs
        left = int(share * size + 0.5)
        return cls(left * cut.runs) if 0 < left < size else f"of {size} query heads of a group {left} would stay"

    @property
    def label(self) -> str:
        """Name it by its heads."""
        return f"query heads {self.left}"

    @property
    def of_what(self) -> str:
        """Return what some of stay."""
        return "query_heads"

    @property
    def channels(self) -> int | None:
        """Return how many heads stay."""
        return self.left
