"""Linears that are quantised one group of shared inputs after another, on calibration samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.guided_rows import guided_rows
from compressor.calibration.statistics import ChannelHessian, Hessian, expert_notes, expert_tokens
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.graph.sites import Site, weight_sites
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.range_search import Observer
from compressor.pipeline.context import Context
from compressor.pipeline.input_scales import calibrate_inputs
from compressor.pipeline.resume import Blocks, cached_tensors
from compressor.pipeline.sites import change_site, compress_site, error_context

FEW_DAMPENING = 0.1  # at 256 tokens a W3 reference model has perplexity 17.3 with it, 18.4 with 0.01


@dataclass(frozen=True)
class Quantized:
    """A linear's weight as it will be stored, and what its record says.

    Attributes:
        packed: the weight; floats, [out, in], stay a dense one.
        error, rtn_error: relative squared error of the outputs, and that of round to nearest, where it is measured.
        notes: whatever the user should know.
    """

    packed: PackedWeight | Tensor
    error: float
    rtn_error: float | None
    notes: Sequence[str] = ()


def enough_dampening(tokens: int, columns: int, dampening_frac: float) -> tuple[float, list[str]]:
    """Return the fraction to dampen a Hessian by, at least 0.1 where it has not full rank, and a note that says so."""
    if tokens >= columns:
        return dampening_frac, []
    dampening_frac = max(dampening_frac, FEW_DAMPENING)
    return dampening_frac, [
        f"calibrated on {tokens} tokens for {columns} inputs, so the Hessian has not full rank: dampening "
        f"{dampening_frac:g}; give more samples"
    ]


def output_loss(W: Tensor, packed: PackedWeight, H: Tensor) -> float:
    """tr((W - Q) H (W - Q)^T), with W in float64."""
    return max(0.0, float(quadratic(W - dequantize(packed), H)))


def quantize_calibrated(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    formats: Mapping[str, Format],
    blocks: Blocks,
    quantize: Callable[[Tensor, Any, Format], Quantized],
    *,
    make_statistic: Callable[[int], Hessian | ChannelHessian] = Hessian,
    true_sequential: bool = True,
    match_dense: bool = True,
    observer: Observer = "mse",
    task_guided: bool = False,
) -> None:
    """Replace the linears that are named, each by one in its own format; what follows sees their new outputs.

    Where all formats are coarse enough, calibration multiplies by :mod:`compressor.numerics.products.bfloat16`.

    Args:
        blocks: of the pass.
        quantize: (weight float32 [out, in], or [channels, taps], statistic, format) -> what it is stored as.
        make_statistic: called with the width of a group's input.
        true_sequential, match_dense: ``true_sequential`` and ``with_dense`` of
            :class:`compressor.calibration.calibrate.CalibrationRun`.
        observer: ``output`` chooses stored scales of activations by the error of the outputs, too.
        task_guided: weight rows as :func:`compressor.calibration.guided_rows.guided_rows` does.
    """
    sites = [site for site in weight_sites(graph) if site.name in formats]
    samples = ctx.calibration(pass_name)
    scales, weights = calibrate_inputs(graph, ctx, pass_name, formats, observer), None
    if task_guided:
        decides = [samples.sha256, ctx.seed, [site.name for site in sites]]
        make = partial(guided_rows, graph, samples.ids, sites, ctx.seed, ctx.spill)
        weights = cached_tensors(graph, ctx, "weights of rows", decides, make)
    options = CalibrationOptions(
        true_sequential,
        match_dense,
        store=blocks,
        spill=ctx.spill,
        row_weights=weights,
        rounded=is_coarse(formats.values()),
    )
    for group, statistic in CalibrationRun(graph, samples.ids, sites, make_statistic, options, ChannelHessian).groups():
        for site in group:
            weight = graph.get_parameter(site.weight_name).detach().float()
            with error_context(site):
                quantized = quantize(weight, statistic, formats[site.name])
            blocks.task.advance()
            _store(graph, ctx, site, quantized, pass_name, statistic, scales.get(site.name))


def _store(
    graph: GraphModule,
    ctx: Context,
    site: Site,
    quantized: Quantized,
    pass_name: str,
    statistic: Any,
    input_scale: Tensor | None,
) -> None:
    """Put a weight in the place of a site's, and record it."""
    notes, stored = [*expert_notes(site, statistic), *quantized.notes], quantized.packed
    if isinstance(stored, Tensor):
        stored = stored.to(graph.get_parameter(site.weight_name).dtype)
        change_site(graph, ctx, site, stored, pass_name, error=quantized.error, error_of="output", notes=notes)
        return
    compress_site(
        graph,
        ctx,
        site,
        stored.with_input_scale(input_scale),
        pass_name,
        error=quantized.error,
        error_of="output",
        rtn_error=quantized.rtn_error,
        notes=notes,
        tokens=expert_tokens(site, statistic),
    )
