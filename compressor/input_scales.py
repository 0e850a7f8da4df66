"""Stored scales of activations: the one place where passes get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule

from compressor.activations_rounding import search_input_scale
from compressor.calibration import Inputs, stream
from compressor.formats import Format
from compressor.graph import linear_sites
from compressor.packing import PackedWeight
from compressor.pipeline import Context
from compressor.sites import naming
from compressor.sites_plan import Gathering


def has_input_scale(fmt: Format) -> bool:
    """Whether the format stores a scale of the activations."""
    return fmt.activations is not None and fmt.activations.calibrated


def store_input_scale(packed: PackedWeight, scale: Tensor | None) -> PackedWeight:
    """The packed weight with the scale, float32 [1], that its format stores; None where it stores none."""
    return packed if scale is None else replace(packed, input_scale=scale)


def gathering_for(fmt: Format) -> Gathering | None:
    """How :func:`calibrate_inputs` runs the samples; None where the format stores no such scale."""
    return Gathering(true_sequential=False, with_dense=False, squares=False) if has_input_scale(fmt) else None


def calibrate_inputs(
    graph: GraphModule, ctx: Context, pass_name: str, formats: Mapping[str, Format]
) -> dict[str, Tensor]:
    """The ``input_scale``, float32 [1], of each site whose format stores one, for the inputs as the graph has them now.

    Where no format does, no samples are asked for.

    Args:
        formats: by the names of the sites.
    Raises:
        UsageError: there are no calibration samples.
        CompressorError: inputs hold NaN or inf; names the site.
    """
    wanted = {name: fmt.activations for name, fmt in formats.items() if has_input_scale(fmt)}
    if not wanted:
        return {}
    ids = ctx.calibration(pass_name, f"stored scales of {next(iter(formats.values())).name}").ids
    sites = [site for site in linear_sites(graph) if site.name in wanted]
    found = {}
    for group, inputs in stream(graph, ids, sites, Inputs, true_sequential=False, spill=ctx.spill):
        for site in group:
            fed = wanted[site.name]
            assert fed is not None
            with naming(site):
                found[site.name] = search_input_scale(inputs.rows, float(inputs.absmax.max()), fed)
    return found
