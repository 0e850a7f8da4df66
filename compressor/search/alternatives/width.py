"""Keep a share of a feed-forward network's inner channels, the most important ones."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.search.space import Alternative, SubLayer, share_of


@dataclass(frozen=True)
class Width(Alternative):
    """Keep the first of the sorted channels.

    Attributes:
        left: channels that stay.
    """

    left: int

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative for a share such as ``0.5``, rounded up to a multiple, or why there is none."""
        share = share_of("width", argument, "channels")
        cut = layer.cuts.get("channels")
        if cut is None:
            return "it has no inner channels of its own that can go"
        left = -(-round(share * cut.family.count) // multiple) * multiple
        return cls(left) if 0 < left < cut.family.count else f"rounded up to a multiple of {multiple} it stays whole"

    @property
    def label(self) -> str:
        """Name it by its channels."""
        return f"width {self.left}"

    @property
    def channels(self) -> int | None:
        """Return how many channels stay."""
        return self.left
