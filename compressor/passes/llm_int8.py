"""LLM.int8(): keep input columns with large activations in float16, the others in int8 (Dettmers et al. 2022,
2208.07339).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.errors import UsageError
from compressor.formats.extras import OutlierFeatures
from compressor.formats.format import Format
from compressor.formats.outliers import add_columns
from compressor.formats.packing import PackedWeight
from compressor.graph.sites import Site
from compressor.numerics.nearest import rtn_quantize, rtn_work, rtn_working_bytes
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites
from compressor.pipeline.sites import choose_format, choose_sites, round_sites

_STEP = 8  # their number is a multiple of this, so that layers share kernels


def large_columns(absmax: Tensor, threshold: float) -> Tensor:
    """Return the columns whose largest input reaches the threshold, and the next largest up to a multiple of 8; int64,
    rising.

    Args:
        absmax: largest absolute inputs, [in].
    """
    count = int((absmax >= threshold).sum())
    count = min(-(-count // _STEP) * _STEP, len(absmax))
    return torch.argsort(absmax, descending=True, stable=True)[:count].sort().values


def llm_int8_quantize(weight: Tensor, columns: Tensor, fmt: Format) -> PackedWeight:
    """Round the weight to nearest, except for some columns that are stored as float16 (eq. 8).

    Args:
        weight: float32 [out, in].
        columns: columns to store as float16, int64, rising.
    """
    return add_columns(rtn_quantize(weight.index_fill(1, columns, 0.0), fmt), weight, columns)


@dataclass(frozen=True)
class LlmInt8(Pass):
    """Round weights and activations to int8, except for the input columns whose activations are large.

    The columns are found on calibration samples, for each group of linears that share an input, and are part of the
    bundle; the paper finds them again for every token.

    Attributes:
        threshold: smallest absolute activation that keeps its column in float16.
        scheme: format of the other columns: integers, with activations rounded at run time.
        targets: class names, module names or ``re:`` patterns of the linears to compress.
        ignore: patterns of linears to leave dense.
    """

    threshold: float = 6.0
    scheme: str = "W8A8"
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        act = choose_format(self.scheme).activations
        if act is None or act.calibrated:
            raise UsageError(f"llm_int8: scheme {self.scheme}: activations are to be rounded while running, as in W8A8")
        if not self.threshold > 0:
            raise UsageError(f"llm_int8: threshold {self.threshold:g} is not above 0")

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear; the record's error is that of the weight (||W - Q||^2 / ||W||^2)."""
        fmt = choose_format(self.scheme)
        sites = choose_sites(graph, "llm_int8", fmt, self.targets, self.ignore)
        samples = ctx.calibration("llm_int8")
        with ctx.reporter.task("llm_int8", len(sites)) as task:
            for group, inputs in CalibrationRun(
                graph, samples.ids, sites, Inputs, CalibrationOptions(true_sequential=False, spill=ctx.spill)
            ).groups():
                columns = large_columns(inputs.absmax, self.threshold)
                if not len(columns):
                    names = ", ".join(site.name for site in group)
                    ctx.notes.append(f"llm_int8: {names}: no input reaches {self.threshold:g}; all columns are int8")

                def quantize(_: Site, weight: Tensor, columns: Tensor = columns) -> PackedWeight:
                    return llm_int8_quantize(weight, columns, fmt)

                round_sites(graph, ctx, "llm_int8", group, task, quantize)
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear as if one of its inputs were large, on a graph without weights.

        Their real number is measured in the run; one suffices for a target without kernels for such columns to refuse.
        """
        fmt = choose_format(self.scheme)
        sites = choose_sites(graph, "llm_int8", fmt, self.targets, self.ignore)
        fmt = fmt.with_extra(OutlierFeatures(1))
        formats = {site.name: fmt for site in sites}
        needs = CalibrationNeeds(False, False, hessian=False)
        return plan_sites(graph, formats, self.ignore, rtn_work, rtn_working_bytes, needs)
