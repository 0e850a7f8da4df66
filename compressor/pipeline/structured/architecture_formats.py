"""State what a search chooses among, formats too, and round alternatives to formats, to score them.

    inputs' mean squares of each linear, of the whole model
    weights of an alternative (`Start`)  --single weights left out, range clipped, rounded-->  weights that scores see

Rounding is to the nearest code.  The pass that packs takes GPTQ, which loses less: most in the smallest formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.kinds.carried import KEPT
from compressor.graph.model import ModelInfo
from compressor.graph.sites import linear_sites
from compressor.numerics.sparsity.n_of_m import stored_in
from compressor.pipeline.context import Context
from compressor.pipeline.structured.architecture import Parts, amounts, find_parts, naming, shapes_of
from compressor.search.front import lowered
from compressor.search.joint import joint
from compressor.search.options import LimitOptions, SpaceOptions
from compressor.search.programme import Limit, check_reachable
from compressor.search.space import (
    Alternative,
    Mapped,
    Space,
    Start,
    Starts,
    SubLayer,
    alternatives,
    kept_entries,
    physical,
)


@dataclass(frozen=True)
class Problem:
    """Hold what a search chooses among.

    Attributes:
        parts: the sub-layers.
        space: what may stand in the place of each.
        joined: the same in each format; the space, where there are none to choose among.
        limits: by measure, but for time.
    """

    parts: Parts
    space: Space
    joined: Space
    limits: dict[str, Limit]


def state_problem(
    graph: GraphModule,
    pass_name: str,
    wanted: SpaceOptions,
    limited: LimitOptions,
    fmt: Format | None,
    formats: Sequence[Format],
) -> Problem:
    """Return what a search of a graph chooses among, and within which limits.

    Args:
        fmt: of all blocks' linears, for times and bytes; None leaves them dense.
        formats: to choose among; none leaves them all in ``fmt``.
    Raises:
        UsageError: the model is neither a decoder nor a classifier of images, the space is empty, or no architecture
            meets a limit.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "decoder" and not info.classes:
        what = "is not a decoder of text alone, nor does it classify images"
        raise UsageError(f"{pass_name}: {info.name} {what}: scores compare predictions of tokens or of classes")
    if info.classes and limited.cache_bytes is not None:
        raise UsageError(f"{pass_name}: cache_bytes: {info.name} classifies images and has no caches; leave it out")
    if not info.classes and limited.peak_memory is not None:
        raise UsageError(f"{pass_name}: peak_memory: of networks of images alone; limit cache_bytes or weight_bytes")
    if any(node.target in KEPT for node in graph.graph.nodes):
        raise UsageError(f"{pass_name}: later layers run kept tokens alone; put it in front of swift_kv")
    parts = find_parts(graph, pass_name, wanted.keep_first, wanted.keep_last)
    with naming(pass_name):
        space = joined = alternatives(parts.layers, wanted.wanted, wanted.multiple, bool(formats))
        if formats:
            joined = joint(parts.layers, space, formats, partial(refused, graph))
        counted = amounts(graph, parts.layers, joined, fmt)
        limits = {name: Limit(*counted[name], most) for name, most in limited.most().items()}
        check_reachable(limits | lowered(limits, limited.budgets))
    return Problem(parts, space, joined, limits)


def refused(graph: GraphModule, layer: SubLayer, one: Alternative, fmt: Format) -> str:
    """Say why a sub-layer's alternative cannot be stored in a format; nothing where it can."""
    for name, shape in shapes_of(graph, layer, one).items():
        try:
            if len(shape) == 2:
                fmt.packed_bytes(*shape)
        except UsageError as error:
            return f"{name}: {error}"
    return ""


def mean_squares(graph: GraphModule, ctx: Context, layers: Sequence[SubLayer], ids: Tensor) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of each linear in the sub-layers, by the name of its weight, float64 [in].

    Args:
        ids: int64 [samples, sequence].
    """
    inside = {node for layer in layers for node in layer.branch.nodes}
    sites = [site for site in linear_sites(graph) if site.node in inside]
    options = CalibrationOptions(true_sequential=False, spill=ctx.spill)
    groups = CalibrationRun(graph, ids, sites, Inputs, options).groups()
    return {site.weight_name: inputs.mean_square for group, inputs in groups for site in group}


class RoundedStarts(Mapping[str, Start]):
    """Starts of a sub-layer's alternatives in formats; each is rounded when it is asked for, and not kept.

    Args:
        row: the alternatives; those without a format are as they were.
        starts: by the alternatives' labels without formats.
        squares: as :func:`mean_squares` returns them.
    """

    def __init__(
        self,
        graph: GraphModule,
        layer: SubLayer,
        row: Sequence[Alternative],
        starts: Mapping[str, Start],
        squares: Mapping[str, Tensor],
    ) -> None:
        self._graph, self._layer, self._starts, self._squares = graph, layer, starts, squares
        self._row = {one.label: one for one in row if one.fmt is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, label: str) -> Start:
        """Return an alternative's weights, rounded."""
        one, graph, layer = self._row[label], self._graph, self._layer
        fmt, cut, mapped = one.fmt, layer.cut(one), layer.mapped
        assert fmt is not None
        start = self._starts.get(one.plain.label, Start(torch.empty(0, dtype=torch.int64)))
        weights = dict(start.weights)
        for name in shapes_of(graph, layer, one):
            is_new = isinstance(mapped, Mapped) and name == f"{mapped.name}.weight"
            source = mapped.weight if is_new and isinstance(mapped, Mapped) else name
            if source not in self._squares:
                continue
            squares, weight = self._squares[source], weights.get(name)
            if weight is None:
                weight = graph.get_parameter(name).detach()
                weight = weight if cut is None else physical(weight, name, cut, start.kept)
            if cut is not None:
                squares = squares[kept_entries(cut, start.kept, name, 1, len(squares))]
            weights[name] = dequantize(stored_in(weight.float(), squares, fmt)).float()
        return Start(start.kept, weights, start.errors)


def rounded_starts(
    graph: GraphModule, ctx: Context, layers: Sequence[SubLayer], space: Space, starts: Starts, ids: Tensor
) -> Starts:
    """Return the starts of a space whose alternatives have formats.

    Args:
        starts: of the alternatives without.
        ids: samples that nothing is scored on, int64 [samples, sequence].
    """
    squares = mean_squares(graph, ctx, layers, ids)
    rows = zip(layers, space, starts, strict=True)
    return [RoundedStarts(graph, layer, row, known, squares) for layer, row, known in rows]
