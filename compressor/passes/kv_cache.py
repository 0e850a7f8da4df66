"""Keys and values in fewer bits: packed where they are made, kept so by the run-time, read so by attention.

Permuting channels at compile time, so that outliers share blocks, is after Trukhanov and Soloveychik 2024, "Accurate
Block Quantization in LLMs with Outliers" (arXiv 2403.20137).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.formats_cache import CacheFormat, cache_bytes_per_token
from compressor.graph import ModelInfo, segments
from compressor.graph_cache import Orders, attention_layers, pack_caches
from compressor.pipeline import Context
from compressor.sites_plan import SitePlan
from compressor.streaming import Stream

_MICRO_BATCH_TOKENS = 2048


def channel_order(mean_square: Tensor) -> Tensor:
    """Channels of each head by falling mean square, so that those of a size share a scale.

    Args:
        mean_square: float64 [Hkv, D].
    Returns:
        int32 [Hkv, D]: the channel at each place.
    """
    # Ten bits, and equal ones as they come: the last bits of a mean depend on the number of threads.
    mantissa, exponent = torch.frexp(mean_square)
    size = torch.ldexp(torch.round(mantissa * 1024) / 1024, exponent)
    return torch.argsort(size, dim=1, descending=True, stable=True).int()


@dataclass(frozen=True)
class KvCache:
    """Store keys and values of earlier tokens in fewer bits; make it the last pass.

    Scales are chosen while running, for each token and head alone.  The bundle's caches have the format's bytes, and
    attention reads them as they are stored; new tokens, too, attend to what is stored.

    Attributes:
        scheme: the caches' format: ``INT8``, ``INT4``, ``FP8_E4M3``, ``BFP8``, ``BFP4``, or one with ``_G<channels>``.
        permute: store each head's channels in an order in which those of a size share a scale, by their mean square
            over the calibration samples; the kernels follow it, and what attention computes stays as it is.
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

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Change the format of all caches."""
        fmt, info = self._check(graph)
        orders = None
        if self.permute and fmt.groups(info.head_dim) > 1:
            means = mean_squares(graph, ctx)
            orders = {
                layer.index: (channel_order(means[layer.keys]), channel_order(means[layer.values]))
                for layer in attention_layers(graph)
            }
        self._finish(graph, ctx, fmt, orders)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Nothing becomes of linears; the graph's caches change as they will in :meth:`run`."""
        fmt, info = self._check(graph)
        orders = None
        if self.permute and fmt.groups(info.head_dim) > 1:
            order = torch.empty(info.kv_heads, info.head_dim, dtype=torch.int32, device="meta")
            orders = {layer.index: (order, order) for layer in attention_layers(graph)}
        self._finish(graph, ctx, fmt, orders)
        return []

    def _check(self, graph: GraphModule) -> tuple[CacheFormat, ModelInfo]:
        info: ModelInfo = graph.meta["model"]
        if info.kind != "decoder":
            raise UsageError(f"kv_cache: {info.name} is no decoder and keeps no keys and values; leave the pass out")
        if not attention_layers(graph):
            raise UsageError(f"kv_cache: the caches are {info.cache_format} already; give the pass once")
        return CacheFormat.parse(self.scheme), info

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


def mean_squares(graph: GraphModule, ctx: Context) -> dict[Node, Tensor]:
    """Of each channel of the new keys and values over all calibration samples, float64 [Hkv, D], by their nodes."""
    ids = ctx.calibration("kv_cache").ids
    stream = Stream(graph, torch.split(ids, max(1, _MICRO_BATCH_TOKENS // ids.shape[1])), ctx.spill)
    wanted = {node for layer in attention_layers(graph) for node in (layer.keys, layer.values)}
    cut, found = segments(graph), dict[Node, Tensor]()
    with ctx.reporter.task("kv_cache", len(wanted)) as task:
        for segment in cut:
            here = [node for node in segment.nodes if node in wanted]
            for i in range(len(stream.batches) if here else 0):
                for node, value in zip(here, stream.values(segment, i, here), strict=True):
                    total = value.double().square().sum((0, 2)) / ids.numel()
                    found[node] = found[node] + total if node in found else total
            task.advance(len(here))
            if len(found) == len(wanted):
                stream.release(segment)
                return found
            stream.advance(segment)
    raise AssertionError("every layer makes its keys and values from tokens")
