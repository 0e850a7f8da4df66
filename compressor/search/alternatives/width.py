"""Keep a share of the inner channels of a feed-forward network or of convolutions, the most important ones."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.search.space import Alternative, SubLayer, share_of


@dataclass(frozen=True)
class Width(Alternative):
    """Keep the first of the sorted channels.

    Attributes:
        left: channels that stay.
        share: what a recipe asked for, which is the same in sub-layers of unlike sizes.
    """

    left: int
    share: float

    @classmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative for a share such as ``0.5``, rounded up to a multiple, or why there is none."""
        share = share_of("width", argument, "channels")
        cut = layer.cuts.get("channels")
        if cut is None:
            return "it has no inner channels of its own that can go"
        left = -(-round(share * cut.family.count) // multiple) * multiple
        if not 0 < left < cut.family.count:
            return f"rounded up to a multiple of {multiple} it stays whole"
        return cls(left, share)

    @property
    def label(self) -> str:
        """Name it by its channels."""
        return f"width {self.left}"

    @property
    def kind(self) -> str:
        """Name it by its share."""
        return f"width:{self.share:g}"

    @property
    def channels(self) -> int | None:
        """Return how many channels stay."""
        return self.left
