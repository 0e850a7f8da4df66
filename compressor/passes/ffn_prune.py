"""Prune the inner channels of feed-forward networks: rows of what writes them and columns of what reads them go.

    up [inner, hidden], gate [inner, hidden]  ->  act  ->  down [hidden, inner]        inner becomes smaller

The graph stays dense, with smaller linears, so that every pass, format and kernel behind it works on fewer weights.
Which channels belong together is read from the dataflow (:mod:`compressor.graph.dependencies.channels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.column_removal import (
    Importance,
    choose_channels,
    only_columns,
    refit_columns,
    removal_work,
    removal_working_bytes,
)
from compressor.numerics.products.deterministic import quadratic
from compressor.pipeline.channels import Channels, choose_channels_of, plan_removal, record_removal, weight_bytes_of
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import change_site, error_context


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
        dependencies, channels, counts = self._choose(graph)
        samples, before, begin = ctx.calibration("ffn_prune"), weight_bytes_of(graph), len(ctx.records)
        of_reader = {name: one for one in channels for name in one.readers}
        sites = [site for site in linear_sites(graph) if site.name in of_reader]
        with ctx.reporter.task("ffn_prune", len(sites)) as task:
            store = Blocks(ctx, "ffn_prune", self, task, decides=samples.sha256, chained=True)
            options = CalibrationOptions(store=store, spill=ctx.spill)
            for group, statistic in CalibrationRun(graph, samples.ids, sites, Hessian, options).groups():
                one = of_reader[group[0].name]
                self._leave_out(graph, ctx, group, one, statistic.value, one.family.count - counts[one.readers])
                task.advance(len(group))
        removed = [(one, counts[one.readers]) for one in channels]
        dependencies.remove([(one.family, _left_out(graph, one)[:count]) for one, count in removed])
        record_removal(graph, ctx, "ffn_prune", begin, removed, before)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Remove as many channels of a graph without weights."""
        dependencies, channels, counts = self._choose(graph)
        removed = [(one, counts[one.readers]) for one in channels]
        work = partial(removal_work, importance=self.importance)
        return plan_removal(graph, dependencies, removed, CalibrationNeeds(True, False), work, removal_working_bytes)

    def _choose(self, graph: GraphModule) -> tuple[Dependencies, list[Channels], dict[tuple[str, ...], int]]:
        """Return the channels, and how many of each to remove, by the linears that read them.

        Raises:
            UsageError: no channels can be removed, or so few that none of their multiples is left out.
        """
        dependencies, channels = choose_channels_of(graph, "ffn_prune", self.targets, self.ignore)
        counts = {}
        for one in channels:
            left = -(-round((1 - self.ratio) * one.family.count) // self.multiple) * self.multiple
            if left >= one.family.count or not left:
                raise UsageError(
                    f"ffn_prune: {one.readers[0]}: ratio {self.ratio:g} of {one.family.count} channels leaves {left}, "
                    f"rounded up to a multiple of {self.multiple}: change `ratio` or `multiple`, or ignore it"
                )
            counts[one.readers] = one.family.count - left
        return dependencies, channels, counts

    def _leave_out(
        self, graph: GraphModule, ctx: Context, group: list[Site], channels: Channels, hessian: Tensor, count: int
    ) -> None:
        """Set the columns of all but ``count`` channels to zero, in what reads them, and refit the others.

        The columns go in the end, with the rows that make them: until then shapes stay, and what follows sees the
        outputs that the smaller model will have.
        """
        weights = [graph.get_parameter(site.weight_name).detach().float() for site in group]
        columns = channels.columns(group[0])
        with error_context(group[0]):
            kept = choose_channels(torch.cat(weights), hessian, columns, count, self.importance)
            kept_columns = columns[kept].flatten().sort().values
            for site, weight in zip(group, weights, strict=True):
                refitted = only_columns(weight, kept_columns)
                if self.refit:
                    refitted = refit_columns(weight, hessian, kept_columns)
                error, norm = (float(quadratic(each.double(), hessian)) for each in (weight - refitted, weight))
                stored = refitted.to(graph.get_parameter(site.weight_name).dtype)
                change_site(
                    graph, ctx, site, stored, "ffn_prune", error=error / norm if norm > 0 else 0.0, error_of="output"
                )


def _left_out(graph: GraphModule, channels: Channels) -> NDArray[np.int64]:
    """Return the channels that no reader reads any more."""
    sites = {site.name: site for site in linear_sites(graph)}
    read = torch.zeros(channels.family.count, dtype=torch.bool)
    for name in channels.readers:
        weight = graph.get_parameter(sites[name].weight_name)
        read |= (weight != 0).any(0)[channels.columns(sites[name])].any(1)
    return (~read).nonzero()[:, 0].numpy()
