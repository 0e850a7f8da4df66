"""Prune the inner channels of feed-forward networks: rows of what writes them and columns of what reads them go.

    up [inner, hidden], gate [inner, hidden]  ->  act  ->  down [hidden, inner]        inner becomes smaller

The graph stays dense, with smaller linears, so that every pass, format and kernel behind it works on fewer weights.
Which channels belong together is read from the dataflow (:mod:`compressor.graph.dependencies.channels`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies
from compressor.numerics.sparsity.column_removal import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.structured.channels import Channels, choose_channels_of, plan_removal, remove_inner


@dataclass(frozen=True)
class FfnPrune(Pass):
    """Remove inner channels of feed-forward networks, and refit what reads the others by least squares.

    Attributes:
        ratio: share of each network's inner channels to remove, above 0 and below 1.
        multiple: what is left is rounded up to a multiple of this, which kernels like.
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
        if not 0 < self.ratio < 1:
            raise UsageError(f"ffn_prune: ratio {self.ratio:g} is not between 0 and 1; 0.25 removes a quarter")
        if not 1 <= self.multiple <= 4096:
            raise UsageError(f"ffn_prune: multiple {self.multiple} is not between 1 and 4096")

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model without such channels."""
        self._choose(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Remove the channels; each reader's record has the relative squared error of its outputs."""
        return remove_inner(graph, ctx, "ffn_prune", self, *self._choose(graph))

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Remove as many channels of a graph without weights."""
        return plan_removal(graph, *self._choose(graph), self.importance)

    def _choose(self, graph: GraphModule) -> tuple[Dependencies, list[tuple[Channels, int]]]:
        """Return the channels, and how many of each to remove.

        Raises:
            UsageError: no channels can be removed, or so few that none of their multiples is left out.
        """
        dependencies, channels = choose_channels_of(graph, "ffn_prune", self.targets, self.ignore)
        removed = []
        for one in channels:
            left = -(-round((1 - self.ratio) * one.family.count) // self.multiple) * self.multiple
            if left >= one.family.count or not left:
                raise UsageError(
                    f"ffn_prune: {one.readers[0]}: ratio {self.ratio:g} of {one.family.count} channels leaves {left}, "
                    f"rounded up to a multiple of {self.multiple}: change `ratio` or `multiple`, or ignore it"
                )
            removed.append((one, one.family.count - left))
        return dependencies, removed
