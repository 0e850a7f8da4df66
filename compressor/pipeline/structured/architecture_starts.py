"""Fit the alternatives of a search space to samples: sort channels, choose heads, and solve for weights.

    sort            channels of feed-forward networks, the most important first; heads stay in their places
    least squares   what reads the channels that stay; a linear that stands in the place of a sub-layer

Invariant: of each number of channels or heads, those that stay are among those of the next larger number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.statistics import Hessian
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.graph.segments import cut_at
from compressor.graph.sites import linear_sites
from compressor.numerics.least_squares import LeastSquares
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.column_removal import Importance, choose_channels, refit_columns
from compressor.pipeline.context import Context
from compressor.pipeline.sites import error_context
from compressor.pipeline.structured.architecture import Parts
from compressor.search.space import (
    Alternative,
    Cut,
    Mapped,
    Space,
    Start,
    SubLayer,
    physical,
    sort_channels,
    sorted_axis,
)


def sort_parts(
    graph: GraphModule, ctx: Context, parts: Parts, space: Space, ids: Tensor, importance: Importance
) -> list[dict[str, Start]]:
    """Sort the inner channels of each sub-layer by importance, in place, and fit its alternatives' weights.

    Of each number of channels or heads the most important of those of the next larger number stay, as `ffn_prune` and
    `head_prune` choose them; what reads them is refitted by least squares to the outputs that it had.

    Args:
        ids: samples, int64 [samples, sequence].
    """
    found: list[dict[str, Start]] = [{} for _ in space]
    owners = {
        site.name: i
        for i, (layer, row) in enumerate(zip(parts.layers, space, strict=True))
        for one in row
        for site in layer.readers(one)
    }
    sites = [site for site in linear_sites(graph) if site.name in owners]
    options = CalibrationOptions(true_sequential=False, spill=ctx.spill)
    orders: list[Tensor | None] = [None] * len(space)
    for group, statistic in CalibrationRun(graph, ids, sites, Hessian, options).groups() if sites else ():
        i = owners[group[0].name]
        with error_context(group[0]):
            found[i], orders[i] = _fitted(graph, parts.layers[i], space[i], statistic.value, importance)
    for i, row in _fit_linears(graph, ctx, parts.layers, space, ids).items():
        found[i] |= row
    for layer, order in zip(parts.layers, orders, strict=True):
        if order is not None:
            sort_channels(graph, layer.cuts["channels"].family, order)
    return found


def _fitted(
    graph: GraphModule, layer: SubLayer, row: Sequence[Alternative], hessian: Tensor, importance: Importance
) -> tuple[dict[str, Start], Tensor | None]:
    """Return how each alternative with fewer channels or heads starts, and the order of its channels, if they are
    sorted.
    """
    starts, order = dict[str, Start](), None
    for what, cut in layer.cuts.items():
        ones = [one for one in row if one.channels is not None and one.of_what == what]
        ones.sort(key=lambda one: one.channels or 0, reverse=True)
        prefixes, behind = dict[str, Tensor](), list[Tensor]()
        kept = torch.arange(cut.family.count)
        entries = torch.from_numpy(cut.family.places[cut.readers[0].weight_name, 1])
        weights = torch.cat([graph.get_parameter(site.weight_name).detach().float() for site in cut.readers])
        for one in ones:
            count = one.channels or 0
            chosen = kept[choose_channels(weights, hessian, entries[kept], count, importance, cut.runs)]
            behind.insert(0, kept[~torch.isin(kept, chosen)])
            kept = prefixes[one.label] = chosen
        if what == "channels" and ones:
            order = torch.cat([kept, *behind])
        for label, channels in prefixes.items():
            starts[label] = _refitted(graph, cut, channels, order if what == "channels" else None, hessian)
    return starts, order


def _refitted(graph: GraphModule, cut: Cut, channels: Tensor, order: Tensor | None, hessian: Tensor) -> Start:
    """Refit what reads some channels, and say which stay once the channels are in a new order, if there is one."""
    kept = channels if order is None else torch.arange(len(channels))
    weights, errors = dict[str, Tensor](), dict[str, float]()
    for site in cut.readers:
        weight = graph.get_parameter(site.weight_name).detach().float()
        entries = torch.from_numpy(cut.family.places[site.weight_name, 1])
        refitted = refit_columns(weight, hessian, entries[channels].flatten().sort().values)
        error, norm = (float(quadratic(each.double(), hessian)) for each in (weight - refitted, weight))
        if order is not None:
            refitted = refitted[:, sorted_axis(entries, order, weight.shape[1])]
        weights[site.weight_name] = physical(refitted, site.weight_name, cut, kept).contiguous()
        errors[site.name] = error / norm if norm > 0 else 0.0
    return Start(kept, weights, errors)


def _fit_linears(
    graph: GraphModule, ctx: Context, layers: Sequence[SubLayer], space: Space, ids: Tensor
) -> dict[int, dict[str, Start]]:
    """Return how the linears that stand for sub-layers start, by the sub-layers' places."""
    wanted = {i: one.label for i, row in enumerate(space) for one in row if one.is_linear}
    found = dict[int, dict[str, Start]]()
    if not wanted:
        return found
    stream = SegmentRunner(graph, split_samples(graph, ids, MICRO_BATCH_TOKENS), ctx.spill)
    entries = list(dict.fromkeys(layer.branch.entry for layer in layers))
    first, *cut = cut_at(graph, entries)
    stream.advance(first)
    with ctx.reporter.task("fit linears", len(wanted)) as task:
        for entry, segment in zip(entries, cut, strict=True):
            for i in (i for i in wanted if layers[i].branch.entry is entry):
                mapped = layers[i].mapped
                assert isinstance(mapped, Mapped)
                sums = LeastSquares(*(int(node.meta["val"].shape[-1]) for node in (mapped.source, mapped.term)))
                for number in range(len(stream.batches)):
                    sums.add(*stream.values(segment, number, [mapped.source, mapped.term]))
                weight, bias, error = sums.solve()
                weights = {f"{mapped.name}.weight": weight, f"{mapped.name}.bias": bias}
                found[i] = {wanted[i]: Start(torch.empty(0, dtype=torch.int64), weights, {mapped.name: error})}
                task.advance()
            if segment.exit is not None and len(found) < len(wanted):
                stream.advance(segment)
    return found
