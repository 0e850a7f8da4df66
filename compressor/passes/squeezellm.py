"""SqueezeLLM: sensitivity-weighted k-means of each row, with outliers stored apart (Kim et al. 2023, arXiv
2306.07629).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.gradients import squared_gradients
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.outliers import largest
from compressor.formats.packing import PackedWeight
from compressor.graph.sites import Site
from compressor.numerics.clustering import cluster
from compressor.numerics.grids import choose_grid
from compressor.numerics.nearest import rtn_quantize, rtn_work, rtn_working_bytes
from compressor.numerics.range_search import Work, grid_work
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites, round_sites

_SENSITIVE = 0.05 / 0.45  # share of outliers chosen by sensitivity (section 4.2)


def squeezellm_quantize(weight: Tensor, sensitivity: Tensor, fmt: Format) -> PackedWeight:
    """Cluster the weights of each row or group, except for outliers, by sensitivity * error ** 2 (eq. 4).

    Outliers are the weights with the largest sensitivity * weight ** 2, the loss if they were zero, and the weights of
    the largest size; they are stored as float16.

    Args:
        weight: float32 [out, in].
        sensitivity: diagonal of the Fisher information, float32 [out, in]; a row of zeros counts as all ones.
        fmt: a format with codebooks.
    Raises:
        CompressorError: weight or sensitivity hold NaN or inf.
    """
    count = fmt.outliers(*weight.shape)
    sensitive = largest(sensitivity * weight.square(), round(_SENSITIVE * count))
    outliers = sensitive | largest(weight.abs().masked_fill(sensitive, -1.0), count - round(_SENSITIVE * count))
    importance = sensitivity.masked_fill(outliers, 0.0)

    def choose(group: Tensor, columns: slice) -> tuple[Tensor, None]:
        return cluster(group, importance[:, columns], fmt.levels, choose_grid(group, fmt)[0]), None

    return rtn_quantize(weight, fmt, choose, outliers)


@dataclass(frozen=True)
class Squeezellm(Pass):
    """Store non-uniform values per row, weighted by the loss's sensitivity to each weight, and outliers in float16.

    Sensitivities are squared gradients of the next-token loss over the calibration samples, one by one, so the model
    must be a decoder.  They are computed once, on the dense model.

    Attributes:
        scheme: name of a format with codebooks, such as ``LUT3_S0.45``.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
    """

    scheme: str = "LUT3_S0.45"
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not choose_format(self.scheme).codebook:
            raise UsageError(f"squeezellm: scheme {self.scheme} has no codebooks; take LUT2 to LUT4, or LUT3_S0.45")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the weight (||W - Q||^2 / ||W||^2)."""
        fmt = choose_format(self.scheme)
        sites = choose_sites(graph, "squeezellm", fmt, self.targets, self.ignore)
        samples = ctx.calibration("squeezellm")
        before = len(ctx.records)
        with ctx.reporter.task("squeezellm", len(sites)) as task:
            for site, squares in squared_gradients(graph, samples.ids, sites, ctx.spill):

                def quantize(_: Site, weight: Tensor, squares: Tensor = squares) -> PackedWeight:
                    return squeezellm_quantize(weight, squares, fmt)

                round_sites(graph, ctx, "squeezellm", [site], task, quantize)
        ctx.records[before:] = reversed(ctx.records[before:])  # gradients arrive from the last linear to the first
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        fmt = choose_format(self.scheme)
        sites = choose_sites(graph, "squeezellm", fmt, self.targets, self.ignore)
        formats = {site.name: fmt for site in sites}
        needs = CalibrationNeeds(False, False, hessian=False, gradients=True)
        return plan_sites(graph, formats, self.ignore, squeezellm_work, rtn_working_bytes, needs)


def squeezellm_work(rows: int, columns: int, fmt: Format) -> Work:
    """Return the work of :func:`compressor.passes.squeezellm.squeezellm_quantize` without the gradients, by unit."""
    work = Counter(rtn_work(rows, columns, fmt))
    work.update(grid_work(rows, columns, fmt, 1))
    work.update({"stream_byte": 40 * rows * columns})
    return work
