"""Share all but the number of channels to remove among passes that remove channels between linears."""

from __future__ import annotations

from abc import abstractmethod

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.structured.channels import Channels, What, choose_channels_of, plan_removal, remove_inner


class InnerPruning(Pass):
    """Remove channels that linears alone write and read.  The options are those of each pass.

    Attributes:
        ratio: share of each family's channels to remove, above 0 and below 1.
        importance: how a channel's loss is estimated.
        refit: whether the linears that read the channels are refitted to the outputs that they had.
        targets, ignore: patterns of linears.
    """

    ratio: float
    importance: Importance
    refit: bool
    targets: str | tuple[str, ...]
    ignore: str | tuple[str, ...]

    @abstractmethod
    def count_removed(self, channels: Channels) -> int:
        """Return how many of a family's channels go; 0 where all of them stay.

        Raises:
            UsageError: all would go, or the pass does not let a family stay whole.
        """

    def why_whole(self, channels: Channels) -> str:
        """Say why none of a family's channels go, and what to do; of a pass that lets families stay whole."""
        return f"none of {channels.family.count} channels would go: change `ratio`, or ignore it"

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise UsageError(f"{self.name}: ratio {self.ratio:g} is not between 0 and 1; 0.25 removes a quarter")

    @property
    def name(self) -> str:
        """Name of the pass, for messages and records."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def what(self) -> What:
        """What goes."""
        return "channels"

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model without such channels, or of which too few or too many would go."""
        self._choose(graph, ctx)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Remove the channels; each reader's record has the relative squared error of its outputs."""
        return remove_inner(graph, ctx, self.name, self, *self._choose(graph, ctx))

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Remove as many channels of a graph without weights."""
        return plan_removal(graph, *self._choose(graph, ctx), self.importance)

    def _choose(self, graph: GraphModule, ctx: Context) -> tuple[Dependencies, list[tuple[Channels, int]]]:
        """Return the channels, and how many of each family to remove; families that stay whole are noted."""
        dependencies, found = choose_channels_of(graph, self.name, self.targets, self.ignore, self.what)
        counts = [self.count_removed(one) for one in found]
        whole = [one for one, count in zip(found, counts, strict=True) if not count]
        if len(whole) == len(found):
            raise UsageError(f"{self.name}: {whole[0].readers[0]}: {self.why_whole(whole[0])}")
        if whole:
            note = f"{self.name}: {len(whole)} of {len(found)} families stay whole, the first of them that of "
            note += f"{whole[0].readers[0]}: {self.why_whole(whole[0])}"
            ctx.notes += [note] if note not in ctx.notes else []
        removed = [(one, count) for one, count in zip(found, counts, strict=True) if count]
        return dependencies, removed
