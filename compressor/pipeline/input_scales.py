"""Calibrate stored scales of activations, for all passes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.formats.format import Format
from compressor.graph.sites import weight_sites
from compressor.numerics.input_scales import search_input_scale
from compressor.numerics.range_search import Observer
from compressor.pipeline.context import Context
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.site_plan import CalibrationNeeds
from compressor.pipeline.sites import error_context


def input_scale_needs(fmt: Format) -> CalibrationNeeds | None:
    """Return how :func:`calibrate_inputs` runs the samples, or None if the format stores no such scale."""
    return CalibrationNeeds(true_sequential=False, with_dense=False, hessian=False) if fmt.has_input_scale else None


def calibrate_inputs(
    graph: GraphModule, ctx: Context, pass_name: str, formats: Mapping[str, Format], observer: Observer = "mse"
) -> Mapping[str, Tensor]:
    """Return the ``input_scale``, float32 [1], of each site whose format stores one, for the graph's present inputs.

    If no format stores one, no samples are needed; if an earlier run has cached the scales, the samples do not run
    again.

    Args:
        formats: formats by site name.
        observer: ``output`` minimises the error of each linear's outputs, the others that of its inputs.
    Raises:
        UsageError: there are no calibration samples.
        CompressorError: inputs hold NaN or inf; names the site.
    """
    wanted = {name: fmt.activations for name, fmt in formats.items() if fmt.has_input_scale}
    if not wanted:
        return {}
    samples = ctx.calibration(pass_name, f"stored scales of {next(iter(formats.values())).name}")
    sites = [site for site in weight_sites(graph) if site.name in wanted]

    def search() -> dict[str, Tensor]:
        found = {}
        for group, inputs in CalibrationRun(
            graph, samples.ids, sites, Inputs, CalibrationOptions(true_sequential=False, spill=ctx.spill)
        ).groups():
            for site in group:
                act = wanted[site.name]
                assert act is not None
                weight = graph.get_parameter(site.weight_name).detach().float() if observer == "output" else None
                with error_context(site):
                    found[site.name] = search_input_scale(inputs.rows, float(inputs.absmax.max()), act, weight)
        return found

    decides = [samples.sha256, {name: formats[name].name for name in wanted}, observer == "output"]
    return cached_tensors(graph, ctx, "stored scales of activations", decides, search)
