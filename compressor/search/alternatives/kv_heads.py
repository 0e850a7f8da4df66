"""Keep some heads of keys and values, the most important ones, with all query heads that read them."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.search.space import Alternative, SubLayer


@dataclass(frozen=True)
class KvHeads(Alternative):
    """Keep some heads of keys and values: the layer's caches get smaller.

    Attributes:
        left: heads of keys that stay.
    """

    left: int

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative for a number of heads, or why there is none."""
        if not argument.isascii() or not argument.isdigit() or int(argument) < 1:
            raise UsageError(f"kv_heads:{argument}: give a number of heads of keys from 1: kv_heads:2")
        cut = layer.cuts.get("groups")
        if cut is None:
            return "it has no heads of keys and values that can go"
        left, count = int(argument), cut.family.count
        return cls(left) if left < count else f"it has {count} heads of keys"

    @property
    def label(self) -> str:
        """Name it by its heads."""
        return f"kv heads {self.left}"

    @property
    def of_what(self) -> str:
        """Return what some of stay."""
        return "groups"

    @property
    def channels(self) -> int | None:
        """Return how many heads stay."""
        return self.left
