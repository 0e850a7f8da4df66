"""Build architectures of a search space: find sub-layers, sort and refit their channels, build a choice, count it.

Invariant of a build: the smaller graph's outputs are those of the whole one with zeros in the place of what went.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.formats.cache import cache_bytes_per_token
from compressor.formats.format import Format
from compressor.graph.blocks import find_blocks, remove_branches
from compressor.graph.dependencies.channels import Dependencies
from compressor.graph.model import ModelInfo, clone_graph, weight_bytes
from compressor.graph.rewrite import replace_linear, set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.column_removal import Importance, choose_channels, refit_columns
from compressor.pipeline.context import Context
from compressor.pipeline.sites import change_site, error_context
from compressor.pipeline.structured.channels import Channels, inner_channels, record_removal, weight_bytes_of
from compressor.pipeline.structured.layer_ranking import Layer
from compressor.pipeline.structured.layers import find_layers, remove_layers
from compressor.search.space import Alternative, Sorted, Space, SubLayer, shorten, sort_channels, sorted_axis

Picks: TypeAlias = "Sequence[Alternative]"
"""The alternative that is taken for each sub-layer."""
_CACHED = (torch.ops.compressor.cached_attention.default, torch.ops.compressor.packed_attention.default)


@dataclass(frozen=True)
class Parts:
    """Hold the sub-layers of one graph.

    Attributes:
        dependencies: of the graph.
        layers: in dataflow order.
        removable: the same, as what can be removed.
        channels: the inner channels of each; None where it has none of its own.
    """

    dependencies: Dependencies
    layers: list[SubLayer]
    removable: list[Layer]
    channels: list[Channels | None]


@contextmanager
def naming(pass_name: str) -> Iterator[None]:
    """Put a pass's name in front of what a search refuses."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{pass_name}: {error}") from error


def find_parts(graph: GraphModule, pass_name: str, keep_first: int, keep_last: int) -> Parts:
    """Find the attentions and feed-forward networks of a model, and the inner channels of each.

    Raises:
        UsageError: the model has no blocks, or weights of it are packed.
    """
    removable = find_layers(graph, pass_name, "either", keep_first, keep_last)
    dependencies, families, _ = inner_channels(graph, "channels")
    sites = {site.name: site for site in linear_sites(graph)}
    layers, channels = list[SubLayer](), list[Channels | None]()
    for layer in removable:
        (branch,) = layer.branches
        inside = set(branch.nodes)
        own = [one for one in families if all(sites[name].node in inside for name in one.names)]
        only = own[0] if len(own) == 1 and branch.part == "ffn" else None
        readers = () if only is None else tuple(sites[name] for name in only.readers)
        family = None if only is None else only.family
        layers.append(SubLayer(layer.name, branch, family, readers, layer.is_kept))
        channels.append(only)
    return Parts(dependencies, layers, removable, channels)


def sort_parts(
    graph: GraphModule, ctx: Context, parts: Parts, space: Space, ids: Tensor, importance: Importance
) -> list[Sorted | None]:
    """Sort the inner channels of each sub-layer by importance, in place, and refit what reads each prefix.

    Of each number of channels the most important of those of the next larger number stay, as `ffn_prune` chooses them;
    what reads them is refitted by least squares to the outputs that it had.

    Args:
        ids: samples, int64 [samples, sequence].
    """
    wanted = [sorted({one.channels for one in row if one.channels is not None}, reverse=True) for row in space]
    found: list[Sorted | None] = [None] * len(wanted)
    owners = {layer.readers[0].name: i for i, layer in enumerate(parts.layers) if wanted[i]}
    names = {site.name for i in owners.values() for site in parts.layers[i].readers}
    sites = [site for site in linear_sites(graph) if site.name in names]
    options = CalibrationOptions(true_sequential=False, spill=ctx.spill)
    for group, statistic in CalibrationRun(graph, ids, sites, Hessian, options).groups():
        i = owners[group[0].name]
        with error_context(group[0]):
            found[i] = _sorted(graph, parts.layers[i], wanted[i], statistic.value, importance)
    for layer, one in zip(parts.layers, found, strict=True):
        if one is not None and layer.family is not None:
            sort_channels(graph, layer.family, one.order)
    return found


def _sorted(
    graph: GraphModule, layer: SubLayer, counts: Sequence[int], hessian: Tensor, importance: Importance
) -> Sorted:
    assert layer.family is not None
    first = layer.readers[0]
    entries = torch.from_numpy(layer.family.places[first.weight_name, 1])
    weights = {site.name: graph.get_parameter(site.weight_name).detach().float() for site in layer.readers}
    kept, behind = torch.arange(layer.channels), list[Tensor]()
    prefixes: dict[int, Tensor] = {}
    for count in counts:
        chosen = kept[choose_channels(torch.cat([*weights.values()]), hessian, entries[kept], count, importance)]
        behind.insert(0, kept[~torch.isin(kept, chosen)])
        kept = prefixes[count] = chosen
    order = torch.cat([kept, *behind])
    index = sorted_axis(entries, order, first.in_features)
    refits: dict[int, dict[str, Tensor]] = {}
    errors: dict[int, dict[str, float]] = {}
    for count, channels in prefixes.items():
        columns = entries[channels].flatten().sort().values
        for name, weight in weights.items():
            refitted = refit_columns(weight, hessian, columns)
            error, norm = (float(quadratic(each.double(), hessian)) for each in (weight - refitted, weight))
            refits.setdefault(count, {})[name] = refitted[:, index]
            errors.setdefault(count, {})[name] = error / norm if norm > 0 else 0.0
    return Sorted(order, refits, errors)


def masked(graph: GraphModule, layers: Sequence[SubLayer], picks: Picks, order: Sequence[Sorted | None]) -> GraphModule:
    """Return a graph that computes what an architecture does, with zeros in place of channels: shapes stay."""
    changed = clone_graph(graph)
    gone = set()
    for layer, one, found in zip(layers, picks, order, strict=True):
        if not one.stays:
            gone.add((layer.branch.sum.name, layer.branch.part))
        elif one.channels is not None:
            assert found is not None
            for site in layer.readers:
                dtype = graph.get_parameter(site.weight_name).dtype
                set_parameter(changed, site.weight_name, found.refits[one.channels][site.name].to(dtype))
    branches = [branch for block in find_blocks(changed) for branch in block.branches] if gone else []
    remove_branches(changed, [branch for branch in branches if (branch.sum.name, branch.part) in gone])
    changed.recompile()
    return changed


def build(
    graph: GraphModule, ctx: Context, pass_name: str, parts: Parts, picks: Picks, order: Sequence[Sorted | None]
) -> None:
    """Make a graph the architecture, in place, dense and smaller, and record each linear that changes."""
    before, begin = weight_bytes_of(graph), len(ctx.records)
    removed = []
    for layer, channels, one, found in zip(parts.layers, parts.channels, picks, order, strict=True):
        if one.channels is None or not one.stays:
            continue
        assert channels is not None
        removed.append((channels, layer.channels - one.channels))
        if found is None:
            continue
        for site in layer.readers:
            weight = found.refits[one.channels][site.name].to(graph.get_parameter(site.weight_name).dtype)
            error = found.errors[one.channels][site.name]
            change_site(graph, ctx, site, weight, pass_name, error=error, error_of="output")
    shorten(parts.dependencies, parts.layers, picks)
    record_removal(graph, ctx, pass_name, begin, removed, before)
    remove_layers(graph, ctx, pass_name, [layer for layer, one in zip(parts.removable, picks, strict=True)
                                          if not one.stays])  # fmt: skip
    graph.recompile()


def built(graph: GraphModule, pass_name: str, picks: Picks, fmt: Format | None) -> GraphModule:
    """Return an architecture to be timed: channels are cut without a refit, blocks' linears rounded to a format."""
    changed = clone_graph(graph)
    parts = find_parts(changed, pass_name, 0, 0)
    inside = {node.name for layer in parts.layers for node in layer.branch.nodes}
    build(changed, Context(), pass_name, parts, picks, [None] * len(picks))
    for site in linear_sites(changed):
        if fmt is not None and site.node.name in inside:
            weight = changed.get_parameter(site.weight_name).detach().float()
            replace_linear(changed, site, rtn_quantize(weight, fmt))
    changed.recompile()
    return changed


def amounts(
    graph: GraphModule, layers: Sequence[SubLayer], space: Space, fmt: Format | None
) -> dict[str, tuple[list[list[float]], float]]:
    """Count the parameters, weight_bytes and cache_bytes of each alternative, and of the model beside the sub-layers.

    Args:
        fmt: of the blocks' linears; None leaves them as they are stored.
    """
    info: ModelInfo = graph.meta["model"]
    rows: dict[str, list[list[float]]] = {"parameters": [], "weight_bytes": [], "cache_bytes": []}
    cached = cache_bytes_per_token(info.cache_format, 1, info.kv_heads, info.head_dim)
    weights = {site.weight_name for site in linear_sites(graph)}
    own_numbers = own_bytes = own_cache = 0.0
    for layer, row in zip(layers, space, strict=True):
        names = _own(graph, layer)
        held = [graph.get_parameter(name) for name in names]
        own_numbers += sum(one.numel() for one in held)
        own_bytes += sum(one.numel() * one.element_size() for one in held)
        cache = cached * sum(node.target in _CACHED for node in layer.branch.nodes)
        own_cache += cache
        shapes = [{name: _shape(graph, layer, name, one) for name in names} for one in row]
        rows["parameters"].append([float(sum(map(math.prod, each.values()))) for each in shapes])
        rows["weight_bytes"].append(
            [float(sum(_bytes(graph, n, s, fmt if n in weights else None) for n, s in each.items())) for each in shapes]
        )
        rows["cache_bytes"].append([float(cache * one.stays) for one in row])
    numbers = sum(one.numel() for one in graph.parameters())
    total = cache_bytes_per_token(info.cache_format, info.layers, info.kv_heads, info.head_dim)
    rest = {
        "parameters": numbers - own_numbers,
        "weight_bytes": weight_bytes(graph) - own_bytes,
        "cache_bytes": total - own_cache,
    }
    return {measure: (rows[measure], rest[measure]) for measure in rows}


def _own(graph: GraphModule, layer: SubLayer) -> list[str]:
    """Return the parameters that nothing but a sub-layer reads."""
    nodes = set(layer.branch.nodes)
    read = {node for inner in nodes for node in inner.all_input_nodes if node.op == "get_attr"}
    held = dict(graph.named_parameters())
    return sorted(str(node.target) for node in read if set(node.users) <= nodes and str(node.target) in held)


def _shape(graph: GraphModule, layer: SubLayer, name: str, one: Alternative) -> tuple[int, ...]:
    """Return a parameter's shape in an alternative; [0] where it goes."""
    shape = list(graph.get_parameter(name).shape)
    if not one.stays:
        return (0,)
    for axis in range(len(shape)):
        if one.channels is not None and layer.family is not None and (name, axis) in layer.family.places:
            shape[axis] -= (layer.channels - one.channels) * layer.family.places[name, axis].shape[1]
    return tuple(shape)


def _bytes(graph: GraphModule, name: str, shape: tuple[int, ...], fmt: Format | None) -> int:
    if fmt is not None and len(shape) == 2:
        return fmt.packed_bytes(*shape)
    return math.prod(shape) * graph.get_parameter(name).element_size()


def alike(graph: GraphModule, layers: Sequence[SubLayer], space: Space) -> list[list[int]]:
    """Group the sub-layers that have the same shapes and alternatives, and so the same costs: their places."""
    groups: dict[object, list[int]] = {}
    for i, (layer, row) in enumerate(zip(layers, space, strict=True)):
        shapes = tuple(sorted(tuple(graph.get_parameter(name).shape) for name in _own(graph, layer)))
        operators = tuple(str(node.target) for node in layer.branch.nodes)
        kinds = tuple(one.label for one in row if one.stays)
        groups.setdefault((layer.branch.part, shapes, operators, kinds), []).append(i)
    return list(groups.values())
