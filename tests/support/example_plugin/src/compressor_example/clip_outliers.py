"""Clip the weights that lie far outside their row, so that one large weight does not stretch the grid of a group.

weight [out, in]  ->  the same, each row within its mean +- `deviations` standard deviations; dense, as before
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor import Context, Pass
from compressor.pipeline.sites import change_site, choose_sites


def clip_rows(weight: Tensor, deviations: float) -> Tensor:
    """Return float32 or float16 [out, in] with each row clipped to so many standard deviations around its mean."""
    mean, spread = weight.mean(1, keepdim=True), deviations * weight.std(1, keepdim=True, correction=0)
    return weight.clamp(mean - spread, mean + spread)


@dataclass(frozen=True)
class ClipOutliers(Pass):
    """Clip each row of the matched linears to a multiple of its standard deviation; a pass behind this one packs them.

    Attributes:
        deviations: what lies farther from its row's mean, in standard deviations, is clipped.
        targets: class names, module names or ``re:`` patterns of the linears.
        ignore: patterns of linears to leave as they are.
    """

    deviations: float = 4.0
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Put clipped weights in the place of the dense ones."""
        for site in choose_sites(graph, "clip_outliers", None, self.targets, self.ignore):
            weight = graph.get_parameter(site.weight_name).detach()
            clipped = clip_rows(weight, self.deviations)
            error = float((weight - clipped).double().norm() / weight.double().norm().clamp_min(1e-300)) ** 2
            notes = [f"{int((clipped != weight).sum())} weights clipped"]
            change_site(graph, ctx, site, clipped, "clip_outliers", error=error, notes=notes)
        return graph
