"""Round to nearest: map every weight to the nearest point of a min-max grid, without calibration.

Only a format with a stored scale of the activations needs calibration samples, for that scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.graph.sites import weight_sites
from compressor.numerics.nearest import rtn_quantize, rtn_work, rtn_working_bytes
from compressor.pipeline.context import Context
from compressor.pipeline.input_scales import calibrate_inputs, input_scale_needs
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import SitePlan, plan_sites
from compressor.pipeline.sites import by_segment, choose_format, choose_sites, round_sites


@dataclass(frozen=True)
class Rtn(Pass):
    """Round the weights of the matched linears, depthwise convolutions too, to the nearest points of their grids.

    Attributes:
        scheme: format name, such as ``W4A16_G128``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
        group_size: columns per scale; 0 keeps the scheme's.
    """

    scheme: str
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    group_size: int = 0

    def __post_init__(self) -> None:
        choose_format(self.scheme, self.group_size)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the weight (||W - Q||^2 / ||W||^2)."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "rtn", fmt, self.targets, self.ignore, weight_sites)
        with ctx.reporter.task("rtn", len(sites)) as task:
            scales = calibrate_inputs(graph, ctx, "rtn", {site.name: fmt for site in sites})
            learnt_from = ctx.calibration("rtn").sha256 if scales else None
            blocks = Blocks(ctx, "rtn", self, task, decides=learnt_from, chained=False)
            for block in by_segment(graph, sites):
                if blocks.restore(graph, block):
                    continue
                round_sites(graph, ctx, "rtn", block, task, lambda _, weight: rtn_quantize(weight, fmt), scales)
                blocks.keep(graph, block)
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "rtn", fmt, self.targets, self.ignore, weight_sites)
        return plan_sites(
            graph, {site.name: fmt for site in sites}, self.ignore, rtn_work, rtn_working_bytes, input_scale_needs(fmt)
        )
