"""Build architectures of a search space: find sub-layers, build a choice, count it.

Invariant of a build: the smaller graph's outputs are those of the whole one with zeros in the place of what went.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.errors import UsageError
from compressor.formats.cache import cache_bytes_per_token
from compressor.formats.format import Format
from compressor.graph.blocks import Branch, find_blocks, remove_branches
from compressor.graph.caches import drop_unread_caches
from compressor.graph.model import ModelInfo, clone_graph, weight_bytes
from compressor.graph.residual import is_sum
from compressor.graph.rewrite import drop_dead_parameters, replace_linear, set_parameter
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.sparsity.n_of_m import stored_in
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.sites import change_site
from compressor.pipeline.structured.channels import Channels, What, inner_channels, record_removal, weight_bytes_of
from compressor.pipeline.structured.layer_ranking import Layer
from compressor.pipeline.structured.layers import find_layers, remove_layers
from compressor.search.space import Alternative, Cut, Mapped, Space, Start, Starts, SubLayer, padded, shorten

Picks: TypeAlias = "Sequence[Alternative]"
"""The alternative that is taken for each sub-layer."""
_CACHED = (torch.ops.compressor.cached_attention.default, torch.ops.compressor.packed_attention.default)
_WHATS: tuple[What, ...] = ("channels", "groups", "query_heads")
_LINEAR = "torch.nn.modules.linear.Linear"


@dataclass(frozen=True)
class Parts:
    """Hold the sub-layers of one graph.

    Attributes:
        layers: in dataflow order.
        removable: the same, as what can be removed.
        channels: what can go of each, by kind: as its cuts, with the linears' names.
    """

    layers: list[SubLayer]
    removable: list[Layer]
    channels: list[dict[str, Channels]]


@contextmanager
def naming(pass_name: str) -> Iterator[None]:
    """Put a pass's name in front of what a search refuses."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{pass_name}: {error}") from error


def find_parts(graph: GraphModule, pass_name: str, keep_first: int, keep_last: int) -> Parts:
    """Find the attentions and feed-forward networks of a model, and the channels and heads of each.

    Raises:
        UsageError: the model has no blocks, or weights of it are packed.
    """
    removable = find_layers(graph, pass_name, "either", keep_first, keep_last)
    families = {what: inner_channels(graph, what)[1] for what in _WHATS}
    sites = {site.name: site for site in linear_sites(graph)}
    layers, channels = list[SubLayer](), list[dict[str, Channels]]()
    for layer in removable:
        (branch,) = layer.branches
        inside, own = set(branch.nodes), dict[str, Channels]()
        for what in _WHATS:
            mine = [one for one in families[what] if all(sites[name].node in inside for name in one.names)]
            if len(mine) == 1 and (what == "channels") == (branch.part != "attention"):
                own[what] = mine[0]
        cuts = {what: Cut(one.family, tuple(sites[name] for name in one.readers)) for what, one in own.items()}
        heads = {int(node.args[1].meta["val"].shape[1]) for node in branch.nodes if node.target in _CACHED}  # type: ignore[union-attr]
        mapped = _mapped(branch, [site for site in sites.values() if site.node in inside])
        layers.append(SubLayer(layer.name, branch, cuts, mapped, max(heads, default=0), layer.is_kept))
        channels.append(own)
    return Parts(layers, removable, channels)


def _mapped(branch: Branch, sites: Sequence[Site]) -> Mapped | str:
    """Return where a linear can stand in the place of a branch, or why it cannot."""
    if branch.part == "convolution":
        return "it is of convolutions, which look at more than one pixel"
    if branch.reason or branch.crosses:
        return branch.reason or "it reads another stream as well"
    if not sites or sites[0].input is branch.entry or sites[0].input.meta["val"].dim() != 3:
        return "no norm stands in front of its first linear, whose output a linear could read"
    terms = branch.terms or tuple(node for node in branch.sum.all_input_nodes if node is not branch.entry)
    if len(terms) != 1 or not is_sum(branch.sum) or terms[0].meta["val"].dim() != 3:
        return "it adds more than one tensor to the stream"
    name = f"{branch.name}.mapped" if branch.name else f"{branch.sum.name}_mapped"
    return Mapped(name, sites[0].input, terms[0], sites[0].weight_name)


def masked(graph: GraphModule, layers: Sequence[SubLayer], picks: Picks, starts: Starts) -> GraphModule:
    """Return a graph that computes what an architecture does, with zeros in place of channels: their shapes stay."""
    changed = clone_graph(graph)
    gone, linears = set(), list[tuple[Mapped, Start]]()
    for layer, one, known in zip(layers, picks, starts, strict=True):
        cut = layer.cut(one)
        if not one.stays:
            gone.add((layer.branch.sum.name, layer.branch.part))
        elif one.is_linear:
            assert isinstance(layer.mapped, Mapped)
            linears.append((layer.mapped, known[one.label]))
        elif cut is not None:
            _set_padded(changed, cut, known[one.label])
        elif one.fmt is not None:
            for name, value in known[one.label].weights.items():
                set_parameter(changed, name, value.to(changed.get_parameter(name).dtype))
    branches = [branch for block in find_blocks(changed) for branch in block.branches] if gone else []
    remove_branches(changed, [branch for branch in branches if (branch.sum.name, branch.part) in gone])
    _put_linears(changed, linears)
    changed.recompile()
    return changed


def _set_padded(graph: GraphModule, cut: Cut, start: Start, but: Sequence[str] = ()) -> None:
    """Set the weights of an alternative in their old shapes, but for some."""
    for name, value in start.weights.items():
        old = graph.get_parameter(name).detach()
        if name not in but:
            set_parameter(graph, name, padded(value, old, name, cut, start.kept).to(old.dtype))


def _put_linears(graph: GraphModule, linears: Sequence[tuple[Mapped, Start]]) -> None:
    """Put linears in the place of sub-layers; what nothing reads any more goes."""
    by_name = {node.name: node for node in graph.graph.nodes}
    for mapped, start in linears:
        source, term = by_name[mapped.source.name], by_name[mapped.term.name]
        held = list[Node]()
        with graph.graph.inserting_before(term):
            for leaf in ("weight", "bias"):
                name = f"{mapped.name}.{leaf}"
                set_parameter(graph, name, start.weights[name].to(mapped.dtype(graph, name)))
                held.append(graph.graph.get_attr(name))
                held[-1].meta["val"] = graph.get_parameter(name)
            new = graph.graph.call_function(torch.ops.compressor.dense_linear.default, (source, *held))
        new.meta = {"val": term.meta["val"], "nn_module_stack": {mapped.name: (mapped.name, _LINEAR)}}
        term.replace_all_uses_with(new)
    if linears:
        drop_unread_caches(graph)
        drop_dead_parameters(graph)


def build(graph: GraphModule, ctx: Context, pass_name: str, parts: Parts, picks: Picks, starts: Starts) -> None:
    """Make a graph the architecture, in place, dense and smaller, and record each linear that changes."""
    chosen = list(zip(parts.layers, parts.channels, picks, starts, strict=True))
    before, begin = weight_bytes_of(graph), len(ctx.records)
    remove_layers(graph, ctx, pass_name, [layer for layer, one in zip(parts.removable, picks, strict=True)
                                          if not one.stays])  # fmt: skip
    linears = [(layer.mapped, known[one.label]) for layer, _, one, known in chosen if one.is_linear]
    _put_linears(graph, [(mapped, start) for mapped, start in linears if isinstance(mapped, Mapped)])
    errors = {name: error for _, start in linears for name, error in start.errors.items()}
    _record_linears(graph, ctx, pass_name, begin, before, errors)
    begin, removed = len(ctx.records), list[tuple[Channels, int]]()
    shortened = list[tuple[Cut, str, Tensor]]()
    for layer, channels, one, known in chosen:
        if (cut := layer.cut(one)) is None or one.channels is None or not one.stays:
            continue
        start = known[one.label]
        removed.append((channels[one.of_what], cut.family.count - one.channels))
        shortened.append((cut, one.of_what, start.kept))
        for site in cut.readers:
            if site.name in start.errors:
                old = graph.get_parameter(site.weight_name).detach()
                weight = padded(start.weights[site.weight_name], old, site.weight_name, cut, start.kept).to(old.dtype)
                change_site(graph, ctx, site, weight, pass_name, error=start.errors[site.name], error_of="output")
        _set_padded(graph, cut, start, [site.weight_name for site in cut.readers if site.name in start.errors])
    shorten(graph, shortened)
    record_removal(graph, ctx, pass_name, begin, removed, before)
    graph.recompile()


def _record_linears(
    graph: GraphModule, ctx: Context, pass_name: str, begin: int, before: Mapping[str, int], errors: Mapping[str, float]
) -> None:
    """Record linears that went for one that stands in the place of a sub-layer, and these."""
    after, known = weight_bytes_of(graph), {record.site for record in ctx.records[begin:]}
    for name in (name for name in {**before, **after} if (name in before) != (name in after) and name not in known):
        note = "stands in the place of a sub-layer" if name in after else "goes for one linear"
        sizes = before.get(name, 0), after.get(name, 0)
        error = float(f"{errors.get(name, 1.0):.6g}")
        ctx.records.append(SiteRecord(name, pass_name, "", *sizes, error, "output", None, note))


def built(graph: GraphModule, pass_name: str, picks: Picks, fmt: Format | None) -> GraphModule:
    """Return an architecture to be timed: the first channels stay, without a refit.

    Args:
        fmt: of blocks' linears of alternatives without a format of their own, and of all others of a network of images;
            None leaves them dense.
    """
    changed = clone_graph(graph)
    parts = find_parts(changed, pass_name, 0, 0)
    formats = formats_of(changed, parts.layers, picks, fmt)
    if fmt is not None:
        formats |= dict.fromkeys((site.name for site in _beside(changed, parts.layers)), fmt)
    starts = [{one.label: bare_start(graph, layer, one)} for layer, one in zip(parts.layers, picks, strict=True)]
    build(changed, Context(), pass_name, parts, picks, starts)
    for site in linear_sites(changed):
        if (stored := formats.get(site.name)) is not None:
            weight = changed.get_parameter(site.weight_name).detach().float()
            replace_linear(changed, site, stored_in(weight, torch.ones(site.in_features), stored))
    changed.recompile()
    return changed


def formats_of(
    graph: GraphModule, layers: Sequence[SubLayer], picks: Picks, fmt: Format | None = None
) -> dict[str, Format]:
    """Return the format of each linear of an architecture that is built of a graph, by the linear's name.

    Args:
        fmt: of alternatives without a format of their own.
    """
    found = dict[str, Format]()
    for layer, one in zip(layers, picks, strict=True):
        stored = one.fmt or fmt
        if stored is None or not one.stays:
            continue
        names = {site.name for site in linear_sites(graph) if site.node in layer.branch.nodes}
        if one.is_linear and isinstance(layer.mapped, Mapped):
            names = {layer.mapped.name}
        found |= dict.fromkeys(names, stored)
    return found


def _beside(graph: GraphModule, layers: Sequence[SubLayer]) -> list[Site]:
    """Return the linears beside the sub-layers that share their format: of a network of images, stem and head."""
    inside, is_shared = {node for layer in layers for node in layer.branch.nodes}, graph.meta["model"].kind == "module"
    return [site for site in linear_sites(graph) if is_shared and site.node not in inside]


def bare_start(graph: GraphModule, layer: SubLayer, one: Alternative) -> Start:
    """Return how an alternative begins without any samples: the first channels stay, and a linear gives zeros."""
    if one.is_linear:
        assert isinstance(layer.mapped, Mapped)
        like, shapes = graph.get_parameter(layer.mapped.weight), _linear_shapes(layer.mapped)
        return Start(torch.empty(0, dtype=torch.int64), {n: like.new_zeros(shape) for n, shape in shapes.items()})
    cut = layer.cut(one)
    return Start(torch.empty(0, dtype=torch.int64) if cut is None else cut.first(one.channels or 0))


def _linear_shapes(mapped: Mapped) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a linear that stands for a sub-layer."""
    columns, rows = (int(node.meta["val"].shape[-1]) for node in (mapped.source, mapped.term))
    return {f"{mapped.name}.weight": (rows, columns), f"{mapped.name}.bias": (rows,)}


def amounts(
    graph: GraphModule, layers: Sequence[SubLayer], space: Space, fmt: Format | None
) -> dict[str, tuple[list[list[float]], float]]:
    """Count the parameters, weight_bytes and cache_bytes of each alternative, and of the model beside the sub-layers.

    Args:
        fmt: of the blocks' linears of alternatives without a format of their own; None leaves them as they are.
    """
    info: ModelInfo = graph.meta["model"]
    rows: dict[str, list[list[float]]] = {"parameters": [], "weight_bytes": [], "cache_bytes": []}
    cached = cache_bytes_per_token(info.cache_format, [1], info.head_dim)
    linears = {site.weight_name for site in linear_sites(graph)}
    whole = {"parameters": 0.0, "weight_bytes": 0.0, "cache_bytes": 0.0}
    for layer, row in zip(layers, space, strict=True):
        caches = sum(node.target in _CACHED for node in layer.branch.nodes)
        shapes = [shapes_of(graph, layer, one) for one in row]
        rows["parameters"].append([float(sum(map(math.prod, each.values()))) for each in shapes])
        rows["weight_bytes"].append(
            [
                float(sum(_bytes(graph, layer, n, s, one.fmt or fmt, linears) for n, s in each.items()))
                for one, each in zip(row, shapes, strict=True)
            ]
        )
        rows["cache_bytes"].append([float(caches * cached * layer.heads_left(one)) for one in row])
        whole["parameters"] += rows["parameters"][-1][0]
        whole["weight_bytes"] += sum(_bytes(graph, layer, n, s, None, linears) for n, s in shapes[0].items())
        whole["cache_bytes"] += rows["cache_bytes"][-1][0]
    total = {
        "parameters": sum(one.numel() for one in graph.parameters()),
        "weight_bytes": weight_bytes(graph),
        "cache_bytes": cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim),
    }
    for site in _beside(graph, layers):
        stored = graph.get_parameter(site.weight_name)
        saved = 0 if fmt is None else stored.numel() * stored.element_size() - fmt.packed_bytes(*stored.shape)
        total["weight_bytes"] -= saved
    return {measure: (rows[measure], total[measure] - whole[measure]) for measure in rows}


def own_parameters(graph: GraphModule, layer: SubLayer) -> list[str]:
    """Return the parameters that nothing but a sub-layer reads."""
    return _read_alone(graph, set(layer.branch.nodes))


def _read_alone(graph: GraphModule, nodes: set[Node]) -> list[str]:
    read = {node for inner in nodes for node in inner.all_input_nodes if node.op == "get_attr"}
    held = dict(graph.named_parameters())
    return sorted(str(node.target) for node in read if set(node.users) <= nodes and str(node.target) in held)


def shapes_of(graph: GraphModule, layer: SubLayer, one: Alternative) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of its own that an alternative of a sub-layer has."""
    names = own_parameters(graph, layer) if one.stays else []
    if one.is_linear:
        assert isinstance(layer.mapped, Mapped)
        norm = set(layer.branch.nodes[: layer.branch.nodes.index(layer.mapped.source) + 1])
        kept = {name: tuple(graph.get_parameter(name).shape) for name in _read_alone(graph, norm)}
        return kept | _linear_shapes(layer.mapped)
    shapes, cut = {name: tuple(graph.get_parameter(name).shape) for name in names}, layer.cut(one)
    if cut is None:
        return shapes
    gone = cut.family.count - (one.channels or 0)
    lost = {place: gone * entries.shape[1] for place, entries in cut.family.places.items()}
    return {n: tuple(size - lost.get((n, axis), 0) for axis, size in enumerate(s)) for n, s in shapes.items()}


def _bytes(
    graph: GraphModule, layer: SubLayer, name: str, shape: tuple[int, ...], fmt: Format | None, linears: set[str]
) -> int:
    """Return the bytes of a parameter of a sub-layer, or of the linear in its place, as they will be stored."""
    new = layer.mapped.dtype(graph, name) if isinstance(layer.mapped, Mapped) else None
    if fmt is not None and len(shape) == 2 and (new or name in linears):
        return fmt.packed_bytes(*shape)
    return math.prod(shape) * (new or graph.get_parameter(name).dtype).itemsize


def alike(graph: GraphModule, layers: Sequence[SubLayer], space: Space) -> list[list[int]]:
    """Group the sub-layers that have the same shapes and alternatives, and so the same costs: their places."""
    groups: dict[object, list[int]] = {}
    for i, (layer, row) in enumerate(zip(layers, space, strict=True)):
        shapes = tuple(sorted(tuple(graph.get_parameter(name).shape) for name in own_parameters(graph, layer)))
        operators = tuple(str(node.target) for node in layer.branch.nodes)
        kinds = tuple(one.label for one in row if one.stays)
        groups.setdefault((layer.branch.part, shapes, operators, kinds), []).append(i)
    return list(groups.values())
