"""Store keys and values in fewer bits: packed where they are made, kept packed by the run-time, read by attention.

Permuting channels at compile time, so that outliers share blocks, is after Trukhanov and Soloveychik 2024, "Accurate
Block Quantization in LLMs with Outliers" (arXiv 2403.20137); the order is chosen otherwise, see
:func:`compressor.numerics.channels.order.order_channels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.errors import CompressorError, UsageError
from compressor.formats.cache import CacheFormat, cache_bytes_per_token
from compressor.graph.caches import AttentionLayer, Orders, attention_layers, pack_caches
from compressor.graph.model import ModelInfo
from compressor.graph.segments import Segment, segments
from compressor.numerics.channels.order import order_channels
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan

_KEPT_ROWS = 64  # of a micro-batch and head


@dataclass(frozen=True)
class KvCache(Pass):
    """Store keys and values of earlier tokens in fewer bits; make it the last pass.

    Scales are chosen while running, for each token and head alone.  The bundle's caches have the format's bytes, and
    attention reads them as they are stored; new tokens, too, attend to what is stored.

    Attributes:
        scheme: the caches' format: ``INT8``, ``INT4``, ``FP8_E4M3``, ``BFP8``, ``BFP4``, or one with ``_G<channels>``.
        permute: store each head's channels in an order in which outliers share blocks, as far as that lessens what
            rounding costs on calibration samples; the kernels follow it, and without rounding nothing would change.
    """

    scheme: str
    permute: bool = False

    scheme_format: ClassVar[type[CacheFormat]] = CacheFormat

    def __post_init__(self) -> None:
        CacheFormat.parse(self.scheme)

    @property
    def runs_samples(self) -> bool:
        """Whether :meth:`run` takes the calibration samples through the graph, once."""
        return self.permute

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models without caches, and caches that are packed already."""
        info: ModelInfo = graph.meta["model"]
        if info.kind != "decoder":
            raise UsageError(
                f"kv_cache: {info.name} is not a decoder, whose caches alone are packed; leave the pass out"
            )
        if not info.layers:
            raise UsageError(f"kv_cache: {info.name} has no attention and keeps no keys and values; leave the pass out")
        if not attention_layers(graph):
            raise UsageError(f"kv_cache: the caches are {info.cache_format} already; give the pass once")
        for layer in attention_layers(graph):
            if any(layer.beyond_packed):
                raise UsageError(
                    f"kv_cache: {layer.name} attends within chunks or with biases (ALiBi, relative positions), for "
                    "which packed caches have no kernels; leave the pass out"
                )

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Change the format of all caches."""
        self.requires(graph, ctx)
        fmt, info = CacheFormat.parse(self.scheme), graph.meta["model"]
        orders = None
        if self.permute and fmt.groups(info.head_dim) > 1:
            orders = _choose_orders(graph, ctx, fmt)
        self._finish(graph, ctx, fmt, orders)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Change the graph's caches as :meth:`run` will; linears stay as they are."""
        fmt, info = CacheFormat.parse(self.scheme), graph.meta["model"]
        orders = None
        if self.permute and fmt.groups(info.head_dim) > 1:
            made = [torch.empty(n, info.head_dim, dtype=torch.int32, device="meta") for n in info.cache_heads]
            orders = {layer.index: (made[layer.index],) * 2 for layer in attention_layers(graph)}
        self._finish(graph, ctx, fmt, orders)
        return []

    def _finish(self, graph: GraphModule, ctx: Context, fmt: CacheFormat, orders: Mapping[int, Orders] | None) -> None:
        info: ModelInfo = graph.meta["model"]
        pack_caches(graph, fmt, orders)
        sizes = (info.cache_heads, info.head_dim)
        now, before = (cache_bytes_per_token(name, *sizes) for name in (fmt.name, info.cache_format))
        notes = [f"keys and values are stored as {fmt.name}: {now} bytes a token in place of {before}"]
        if fmt.group_size > info.head_dim:
            notes.append(f"a head has {info.head_dim} channels, so its groups are no larger")
        elif fmt.group_size and (ragged := info.head_dim % fmt.group_size):
            notes.append(f"the last group of a head has {ragged} of {fmt.group_size} channels")
        if self.permute and orders is None:
            notes.append(f"nothing is permuted: all {info.head_dim} channels of a head share one scale")
        ctx.notes.append(f"kv_cache: {'; '.join(notes)}")


def _choose_orders(graph: GraphModule, ctx: Context, fmt: CacheFormat) -> dict[int, Orders]:
    """Choose each layer's orders.

    An error in a key's channel costs the queries' mean square there, in a value's channel 1.
    """
    ids = ctx.calibration("kv_cache").ids
    stream = SegmentRunner(graph, split_samples(graph, ids, MICRO_BATCH_TOKENS), ctx.spill)
    layers, found = attention_layers(graph), dict[int, Orders]()
    caches = {layer.index for layer in layers}
    with ctx.reporter.task("kv_cache", len(caches)) as task:
        for segment in segments(graph):
            for layer in layers:
                if layer.node in segment.nodes and layer.index not in found:  # layers may share a cache
                    found[layer.index] = _layer_orders(stream, segment, layer, fmt)
                    task.advance()
            if len(found) == len(caches):
                stream.release(segment)
                break
            stream.advance(segment)
    return found


def _layer_orders(stream: SegmentRunner, segment: Segment, layer: AttentionLayer, fmt: CacheFormat) -> Orders:
    kept: list[list[Tensor]] = [[], [], []]  # rows of queries, keys and values, [heads, tokens, D]
    for i in range(len(stream.batches)):
        values = stream.values(segment, i, [layer.queries, layer.keys, layer.values])
        for rows, value in zip(kept, values, strict=True):
            each = value.transpose(0, 1).flatten(1, 2)
            rows.append(each[:, :: max(1, each.shape[1] // _KEPT_ROWS)].clone())
    q, k, v = (torch.cat(rows, dim=1) for rows in kept)
    if not all(bool(torch.isfinite(rows).all()) for rows in (q, k, v)):
        raise CompressorError(
            f"kv_cache: {layer.name}: queries, keys or values of the calibration samples hold NaN or inf; check the "
            "checkpoint, and what earlier passes made of it"
        )
    heads, _, width = k.shape
    costs = q.double().square().mean(1).view(heads, -1, width).mean(1)
    key_orders = [order_channels(k[h], costs[h], fmt) for h in range(heads)]
    value_orders = [order_channels(v[h], torch.ones_like(costs[h]), fmt) for h in range(heads)]
    return torch.stack(key_orders), torch.stack(value_orders)
