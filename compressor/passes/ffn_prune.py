"""Prune the inner channels of feed-forward networks: rows of what writes them and columns of what reads them go.

    up [inner, hidden], gate [inner, hidden]  ->  act  ->  down [hidden, inner]        inner becomes smaller

The graph stays dense, with smaller linears, so that every pass, format and kernel behind it works on fewer weights.
Which channels belong together is read from the dataflow (:mod:`compressor.graph.dependencies.channels`).
"""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.structured.channels import Channels
from compressor.pipeline.structured.inner_pruning import InnerPruning


@dataclass(frozen=True)
class FfnPrune(InnerPruning, Pass):
    """Remove inner channels of feed-forward networks, and refit what reads the others by least squares.

    Attributes:
        ratio: share of each network's inner channels to remove, above 0 and below 1.
        multiple: what is left is rounded up to a multiple of this, which kernels like; a network too narrow for that
            stays whole, and a note says so.
        importance: ``obs`` removes in eight rounds what costs least once the other channels make up for it (optimal
            brain surgery, as ZipLM does to columns); ``activation`` goes by the size of a channel's contribution to the
            outputs, ``magnitude`` by its weights alone.
        refit: whether the linears that read the channels are refitted to the outputs that they had.
        targets: class names, module names or ``re:`` patterns of linears whose channels are removed.
        ignore: patterns of linears whose channels stay.
    """

    ratio: float = 0.25
    multiple: int = 32
    importance: Importance = "obs"
    refit: bool = True
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.multiple <= 4096:
            raise UsageError(f"{self.name}: multiple {self.multiple} is not between 1 and 4096")

    def count_removed(self, channels: Channels) -> int:
        """Return how many channels of a network go, so that a multiple is left; none of one too narrow for that."""
        left = self._left(channels)
        if not left:
            raise UsageError(
                f"{self.name}: {channels.readers[0]}: ratio {self.ratio:g} would take all of "
                f"{channels.family.count} channels: change `ratio`, or ignore it"
            )
        return max(0, channels.family.count - left)

    def why_whole(self, channels: Channels) -> str:
        """Say how many channels would be left."""
        return (
            f"ratio {self.ratio:g} of {channels.family.count} channels leaves {self._left(channels)}, rounded up to a "
            f"multiple of {self.multiple}: change `ratio` or `multiple`, or ignore it"
        )

    def _left(self, channels: Channels) -> int:
        return -(-round((1 - self.ratio) * channels.family.count) // self.multiple) * self.multiple
