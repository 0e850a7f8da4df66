"""AWQ: scale up channels with large inputs before rounding, which gives them finer steps (Lin et al. 2023,
2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Inputs
from compressor.formats.format import Format
from compressor.graph.folding import ScaleTarget
from compressor.numerics.nearest import awq_quantize
from compressor.numerics.scale_search import scaled_work, scaled_working_bytes, search_scale
from compressor.pipeline.context import Context
from compressor.pipeline.input_scales import calibrate_inputs
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.scaling import scale_groups
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites, round_sites

_STRENGTHS = tuple(0.05 * step for step in range(20))


def awq_scale(mean_abs: Tensor, strength: float) -> Tensor:
    """Return s = mean|X| ^ strength (eq. 5), scaled so that max(s) min(s) = 1.

    Args:
        mean_abs: mean size of the inputs, float [in]; channels without input get the mean of the others.
    Returns:
        float64 [in].
    """
    size = mean_abs.double()
    used = size > 0
    if not bool(used.any()):
        return torch.ones_like(size)
    scale = torch.where(used, size, size[used].mean()).pow(strength)
    return scale / (scale.max() * scale.min()).sqrt()


@dataclass(frozen=True)
class Awq(Pass):
    """Scale input channels by the size of their inputs, then round the weights on clipped grids.

    The scale is folded into the operator in front of the linears: a norm, a linear, a factor of a product, the values
    of attention.  Where it cannot be folded, weights are rounded unscaled and the run's report says why.

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
        """Scale all groups of linears, which preserves the graph's function, then replace every matched linear."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "awq", fmt, self.targets, self.ignore)
        with ctx.reporter.task("awq", 2 * len(sites)) as task:
            squares = scale_groups(graph, ctx, "awq", sites, task, partial(_search, fmt))
            scales = calibrate_inputs(graph, ctx, "awq", {site.name: fmt for site in sites})
            round_sites(
                graph, ctx, "awq", sites, task, lambda site, w: awq_quantize(w, squares[site.name], fmt), scales
            )
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme, self.group_size)
        sites = choose_sites(graph, "awq", fmt, self.targets, self.ignore)
        return plan_sites(
            graph,
            {site.name: fmt for site in sites},
            self.ignore,
            partial(scaled_work, tries=len(_STRENGTHS)),
            scaled_working_bytes,
            CalibrationNeeds(true_sequential=False, with_dense=False, hessian=False),
        )


def _search(fmt: Format, inputs: Inputs, weights: Sequence[Tensor], target: ScaleTarget) -> Tensor:
    return search_scale(inputs.rows, weights, fmt, _STRENGTHS, partial(awq_scale, inputs.mean_abs), target.shared)
