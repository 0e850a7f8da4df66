"""Formats for linears under one budget: of bits, bytes, modelled time, or divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import meta_packed
from compressor.graph.model import ModelInfo, clone_graph, weight_bytes
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import Site, linear_sites, packed_sites
from compressor.recipe.gates import parse_amount
from compressor.search.knapsack import amount, choose_within

BUDGETS = ("bits", "weight_bytes", "latency_ms", "kl_divergence")
_ENCODED_TOKENS = 128  # of an encoder's call, as compressor.evaluate.speed times it


@dataclass(frozen=True)
class Budget:
    """A limit.

    Attributes:
        kind: one of :data:`BUDGETS`.
        limit: bits a weight, bytes, milliseconds or nats a token.
    """

    kind: str
    limit: float

    def __str__(self) -> str:
        return f"{self.kind} {self.limit:,.0f}" if self.kind == "weight_bytes" else f"{self.kind} {self.limit:g}"


def only_budget(pass_name: str, given: Mapping[str, float | str | None]) -> Budget:
    """Return the one budget that is given.

    Args:
        given: by kind; text with a unit as gates have it.
    Raises:
        UsageError: there is none, more than one, or one that is no positive amount.
    """
    named = {kind: value for kind, value in given.items() if value is not None}
    if len(named) != 1:
        what = f"found {' and '.join(named)}" if named else "found none"
        raise UsageError(f"{pass_name}: give exactly one budget of {', '.join(BUDGETS)}; {what}")
    ((kind, value),) = named.items()
    limit = value if kind == "bits" else parse_amount(kind, value)
    if not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise UsageError(f"{pass_name}: {kind} {value}: give a number above 0")
    return Budget(kind, float(limit))


def choose_formats(
    graph: GraphModule,
    sites: Sequence[Site],
    formats: Sequence[Format],
    costs: Sequence[Sequence[float]],
    budget: Budget,
    prices: Mapping[str, float] | None,
) -> dict[str, Format]:
    """Choose a format for each site: the least sum of costs within the budget, or the least bytes within a divergence.

    Args:
        graph: with the sites still dense.
        costs: of each site in each format; divergences, in nats a token, where that is the budget.
        prices: seconds by unit of work, for a budget of time (:attr:`compressor.pipeline.context.Context.prices`).
    Raises:
        UsageError: the smallest choice exceeds the budget, or it is one of time and nobody knows the prices.
    """
    sizes: list[list[float]] = [[fmt.packed_bytes(s.out_features, s.in_features) for fmt in formats] for s in sites]
    limit, rest = budget.limit, 0.0
    if budget.kind == "bits":
        limit *= sum(site.out_features * site.in_features for site in sites) / 8
    elif budget.kind == "weight_bytes":
        rest = _other_bytes(graph, sites, formats[0])
    elif budget.kind == "latency_ms":
        if prices is None:
            raise UsageError(
                f"{budget}: what work costs on this machine is not known here; compress through compressor.compress or "
                "the command line, or give the context prices=compressor.plan.prices.machine_prices().seconds"
            )
        tokens = _tokens(graph, [*linear_sites(graph), *packed_sites(graph)])
        rest = 1e3 * _other_seconds(graph, sites, tokens, prices)
        shapes = [(site.out_features, site.in_features, tokens[site.name]) for site in sites]
        sizes = [[1e3 * linear_seconds(*shape, fmt, prices) for fmt in formats] for shape in shapes]
    elif budget.kind == "kl_divergence":
        sizes, costs = [list(row) for row in costs], sizes
    try:
        picked = choose_within(costs, sizes, limit - rest)
    except UsageError as error:
        beside = f"what is not matched takes {amount(rest)}; " if rest else ""
        raise UsageError(f"{budget}: {beside}{error} {_UNITS[budget.kind]}") from error
    return {site.name: formats[index] for site, index in zip(sites, picked, strict=True)}


_UNITS = {"bits": "bytes; add a smaller scheme", "weight_bytes": "bytes; add a smaller scheme or match more linears",
          "latency_ms": "ms; add a smaller scheme or match more linears",
          "kl_divergence": "nats a token; add a larger scheme"}  # fmt: skip


def linear_seconds(rows: int, columns: int, tokens: int, fmt: Format, prices: Mapping[str, float]) -> float:
    """Return a packed linear's least time, seconds: reading its bytes or computing its products, the longer of both."""
    product = 2.0 * rows * columns * tokens * prices["int8_op" if fmt.integer_products else "matmul_flop"]
    return max(product, fmt.packed_bytes(rows, columns) * prices["read_byte"])


def _other_bytes(graph: GraphModule, sites: Sequence[Site], fmt: Format) -> int:
    """Bytes of all parameters but the packed weights, once the sites are packed."""
    packed, names = clone_graph(graph), {site.name for site in sites}
    for site in linear_sites(packed):
        if site.name in names:
            replace_linear(packed, site, meta_packed(site.out_features, site.in_features, fmt))
    return weight_bytes(packed) - sum(fmt.packed_bytes(site.out_features, site.in_features) for site in sites)


def _other_seconds(
    graph: GraphModule, sites: Sequence[Site], tokens: Mapping[str, int], prices: Mapping[str, float]
) -> float:
    """Of the linears that are not among the sites, dense or packed, as :func:`linear_seconds` has it."""
    names, seconds = {site.name for site in sites}, 0.0
    for site in linear_sites(graph):
        if site.name not in names:
            weight = graph.get_parameter(site.weight_name)
            product = 2.0 * weight.numel() * tokens[site.name] * prices["matmul_flop"]
            seconds += max(product, weight.numel() * weight.element_size() * prices["read_byte"])
    for site in packed_sites(graph):
        fmt = Format.parse(str(site.node.args[-3]))
        seconds += linear_seconds(site.out_features, site.in_features, tokens[site.name], fmt, prices)
    return seconds


def _tokens(graph: GraphModule, sites: Sequence[Site]) -> dict[str, int]:
    """Rows of each linear's input in the call that is timed: a decoder's step, an encoder's 128 tokens, one image."""
    info: ModelInfo = graph.meta["model"]
    if info.kind != "module":
        each = 1 if info.generates else min(_ENCODED_TOKENS, info.max_positions or _ENCODED_TOKENS)
        return {site.name: each for site in sites}
    return {site.name: math.prod(map(_size, site.node.meta["val"].shape[1:-1])) for site in sites}


def _size(size: Any) -> int:
    """Return a dimension's size; for a symbolic one, the example's."""
    return size if isinstance(size, int) else int(size.node.hint)
