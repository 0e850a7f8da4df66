"""Keys and values in fewer bits: packed where they are made, kept so by the run-time, read so by attention.

Permuting channels at compile time, so that outliers share blocks, is after Trukhanov and Soloveychik 2024, "Accurate
Block Quantization in LLMs with Outliers" (arXiv 2403.20137); the order is chosen otherwise, see :func:`block_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.errors import CompressorError, UsageError
from compressor.formats.cache import CacheFormat, cache_bytes_per_token
from compressor.formats.packed_cache import dequantize_cache, pack_cache, quantize_cache
from compressor.graph.caches import AttentionLayer, Orders, attention_layers, pack_caches
from compressor.graph.model import ModelInfo
from compressor.graph.segments import Segment, segments
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan

_KEPT_ROWS = 64  # of a micro-batch and head
_SWEEPS = 8
_LEAST_GAIN = 1e-6  # of the cost: the last bits of a mean must not decide


def block_order(rows: Tensor, weight: Tensor, fmt: CacheFormat) -> Tensor:
    """Deal channels out to the format's blocks so that rounding costs less: ``sum_d w_d min(E x_d^2, c E max_b x^2)``.

    A block's step is in proportion to its largest channel, and whoever is smaller than the step is lost, but no more.
    Swaps of two channels, each the best for one of them, until none helps; the order as it comes, unless the rows are
    rounded better.  Sorting by size, as in the paper, puts the two channels of a rotary pair together, of which one is
    large when the other is small: measured, scores got worse by it.

    Args:
        rows: float32 [tokens, D].
        weight: float64 [D], what an error of each channel costs.
    Returns:
        int32 [D]: the channel at each place; within a block they keep their order.
    """
    squares = rows.double().square().t().contiguous()  # [D, tokens]
    sizes, ratio = squares.mean(1), 1 / (12 * fmt.largest**2)
    block = torch.arange(len(squares)) // fmt.span(len(squares))
    tops, rest = torch.empty_like(squares), torch.empty_like(squares)  # a block's largest: with and without a channel

    def renew(b: int) -> None:
        inside = torch.where(block == b)[0]
        values, places = squares[inside].topk(min(2, len(inside)), dim=0)
        second = values[1] if len(inside) > 1 else torch.zeros_like(values[0])
        tops[inside] = values[0]
        rest[inside] = torch.where(torch.arange(len(inside))[:, None] == places[0], second, values[0])

    for b in range(int(block[-1]) + 1):
        renew(b)
    costs = weight * torch.minimum(sizes, ratio * tops.mean(1))
    least = -_LEAST_GAIN * float(costs.sum())
    for _ in range(_SWEEPS):
        moved = False
        for i in range(len(squares)):
            a, same = int(block[i]), block[:, None] == block
            # Costs of all channels d when i and j change places, were they all in i's old block, or in j's: [j, d].
            old, new = (
                weight * torch.minimum(sizes, ratio * tops_.mean(1)[:, None])
                for tops_ in (torch.maximum(rest[i], squares), torch.maximum(rest, squares[i]))
            )
            mine = old[:, block == a].sum(1) - old[:, i] + old.diagonal()
            theirs = (new * same).sum(1) - new.diagonal() + new[:, i]
            blocks = (costs * same).sum(1)
            change = torch.where(same[i], 0.0, mine + theirs - blocks[i] - blocks)
            j = int(change.argmin())
            if float(change[j]) < least:
                block[i], block[j] = int(block[j]), a
                renew(int(block[i]))
                renew(a)
                costs = weight * torch.minimum(sizes, ratio * tops.mean(1))
                moved = True
        if not moved:
            break
    order = torch.argsort(block, stable=True)
    lost = (_rounding_cost(rows[:, o], weight[o], fmt) for o in (order, torch.arange(len(order))))
    return (order if next(lost) < next(lost) * (1 - _LEAST_GAIN) else torch.arange(len(order))).int()


def _rounding_cost(rows: Tensor, weight: Tensor, fmt: CacheFormat) -> float:
    read = dequantize_cache(pack_cache(*quantize_cache(rows, fmt), fmt), fmt, rows.shape[1])
    return float((read - rows).double().square().mean(0) @ weight)


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
            raise UsageError(f"kv_cache: {info.name} is not a decoder and keeps no keys and values; leave the pass out")
        if not attention_layers(graph):
            raise UsageError(f"kv_cache: the caches are {info.cache_format} already; give the pass once")

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
        """Nothing becomes of linears; the graph's caches change as they will in :meth:`run`."""
        fmt, info = CacheFormat.parse(self.scheme), graph.meta["model"]
        orders = None
        if self.permute and fmt.groups(info.head_dim) > 1:
            order = torch.empty(info.kv_heads, info.head_dim, dtype=torch.int32, device="meta")
            orders = {layer.index: (order, order) for layer in attention_layers(graph)}
        self._finish(graph, ctx, fmt, orders)
        return []

    def _finish(self, graph: GraphModule, ctx: Context, fmt: CacheFormat, orders: Mapping[int, Orders] | None) -> None:
        info: ModelInfo = graph.meta["model"]
        pack_caches(graph, fmt, orders)
        sizes = (info.layers, info.kv_heads, info.head_dim)
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
    """Orders by layer.  An error in a key's channel costs the queries' mean square there, in a value's always 1."""
    ids = ctx.calibration("kv_cache").ids
    stream = SegmentRunner(graph, torch.split(ids, max(1, MICRO_BATCH_TOKENS // ids.shape[1])), ctx.spill)
    layers, found = attention_layers(graph), dict[int, Orders]()
    with ctx.reporter.task("kv_cache", len(layers)) as task:
        for segment in segments(graph):
            for layer in layers:
                if layer.node in segment.nodes:
                    found[layer.index] = _layer_orders(stream, segment, layer, fmt)
                    task.advance()
            if len(found) == len(layers):
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
    key_orders = [block_order(k[h], costs[h], fmt) for h in range(heads)]
    value_orders = [block_order(v[h], torch.ones_like(costs[h]), fmt) for h in range(heads)]
    return torch.stack(key_orders), torch.stack(value_orders)
