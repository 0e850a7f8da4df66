"""SmoothQuant: move part of the activations' range into the weights (Xiao et al. 2023, arXiv 2211.10438)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.statistics import Inputs
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.folding import ScaleTarget
from compressor.numerics.scale_search import search_scale
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.scaling import scale_groups
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_dense_sites
from compressor.pipeline.sites import choose_format, choose_sites

_STRENGTHS = tuple(0.1 * step for step in range(11))


def smooth_scale(absmax: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """Return s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (eq. 4), over all linears that read X; 1 for channels without
    range.

    Args:
        absmax: largest absolute inputs, float [in].
        weights: float [out, in] each.
    Returns:
        float64 [in].
    """
    tops = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).double()
    scale = absmax.double().pow(alpha) / tops.pow(1 - alpha)
    return torch.where((absmax > 0) & (tops > 0), scale, 1.0)


@dataclass(frozen=True)
class Smoothquant(Pass):
    """Divide input channels of linears by a scale and multiply their weights' columns by it; a later pass quantises.

    The scale is folded into the operator in front of the linears: a norm, a linear, a factor of a product, the values
    of attention.  Where it cannot be folded, the linears stay as they are and the run's report says why.

    Attributes:
        alpha: share of the range that moves into the weights, 0 to 1; ``search`` takes the best of eleven values for
            each group of linears, by the error of their outputs on calibration samples.
        scheme: format that the search quantises to; give the later pass the same.
        targets: class names, module names or ``re:`` patterns of the linears to smooth.
        ignore: patterns of linears to leave as they are.
    """

    alpha: float | Literal["search"] = 0.5
    scheme: str = "W8A8"
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choose_format(self.scheme)
        if self.alpha != "search" and not 0 <= self.alpha <= 1:
            raise UsageError(f"smoothquant: alpha {self.alpha} is not between 0 and 1")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Scale every group of linears that share an input; the graph's function does not change."""
        fmt = choose_format(self.scheme)
        sites = choose_sites(graph, "smoothquant", fmt, self.targets, self.ignore)
        with ctx.reporter.task("smoothquant", len(sites)) as task:
            scale_groups(graph, ctx, "smoothquant", sites, task, partial(self._choose, fmt))
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme)
        chosen = choose_sites(graph, "smoothquant", fmt, self.targets, self.ignore)
        tries = len(_STRENGTHS) if self.alpha == "search" else 0
        return plan_dense_sites(graph, chosen, CalibrationNeeds(False, False, hessian=False), tries, fmt)

    def _choose(self, fmt: Format, inputs: Inputs, weights: Sequence[Tensor], target: ScaleTarget) -> Tensor:
        scale_of = partial(smooth_scale, inputs.absmax, weights)
        if self.alpha == "search":
            return search_scale(inputs.rows, weights, fmt, _STRENGTHS, scale_of, target.shared)
        return scale_of(self.alpha)
