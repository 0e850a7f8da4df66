"""How fast the bundle can be at best: per layer, operations and bytes, and which of the two binds.

After LLM-Viewer (Yuan et al. 2024, arXiv 2402.16363): a layer takes at least its operations at the machine's peak and
at least its bytes at the memory's bandwidth, or at that of the second-level caches if all that a phase reads may stay
in the caches.  All are measured here, by kernels that do nothing else (:mod:`compressor.codegen.peaks`), so they are
what this machine reaches, not what its data sheet says.  Element-wise operators are fused into chains that stay in
the caches: their operations count, their bytes do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import GraphModule, Node

from compressor.formats.format import Format
from compressor.graph.costs import NodeCost, node_costs
from compressor.graph.kinds.encoder_decoder import encoder_nodes
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.segments import segments
from compressor.host.devices import DeviceFigures
from compressor.host.machine import cache_bytes
from compressor.plan.prices import Prices

PROMPT_TOKENS = 128
_CACHED = 2  # caches are exclusive of one another, and keep much of what is twice their size


@dataclass(frozen=True)
class Layer:
    """A stretch of the graph between two cuts; several, where they are equal.

    Attributes:
        name: what its linears are called, with ``*`` for numbers.
        count: how many equal ones there are.
        ops: operations of each, a multiplication and an addition are two.
        bytes: that each reads and writes: weights as they are stored, keys and values, activations.
        binds: what takes longer.
        ms: the longer of the two, for each.
    """

    name: str
    count: int
    ops: float
    bytes: int
    binds: Literal["compute", "memory"]
    ms: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / max(1, self.bytes)


@dataclass(frozen=True)
class Roofline:
    """One phase of the model.

    Attributes:
        phase: ``prefill``, ``decode`` or ``forward``.
        tokens: that run at once.
        layers: in order of first appearance.
        ms: of all of them.
        tokens_per_s: bound on the speed.
    """

    phase: str
    tokens: int
    layers: Sequence[Layer]
    ms: float
    tokens_per_s: float


def rooflines(graph: GraphModule, prices: Prices) -> list[Roofline]:
    """Prefill and decode of a decoder, the latter without its encoder; the forward call of an encoder.

    Args:
        graph: the compressed graph; parameters may be on the meta device.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind == "module":
        return []
    prompt = min(PROMPT_TOKENS, info.max_positions or PROMPT_TOKENS)
    if info.kind == "encoder":
        return [_phase(graph, prices, "forward", prompt, 0)]
    return [_phase(graph, prices, "prefill", prompt, 0), _phase(graph, prices, "decode", 1, prompt)]


def device_rooflines(graph: GraphModule, prices: Prices, device: DeviceFigures) -> list[Roofline]:
    """Return the phases of :func:`rooflines` on another device, by its published figures.

    Weights are read from its memory, however small the model: bandwidths of caches are not published.
    """
    return rooflines(graph, replace(prices, cpu=device.name, seconds={**prices.seconds, **device.seconds}))


def bound_ms(graph: GraphModule, prices: Prices) -> float:
    """Return the bound of a decoder's step, of an encoder's forward call, or of one image of a plain module, in ms.

    A module that was captured with a fixed batch is taken as it is.
    """
    if graph.meta["model"].kind != "module":
        return rooflines(graph, prices)[-1].ms
    one = clone_graph(graph)
    args, shapes = graph.meta["inputs"]
    batch = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    one.meta["inputs"] = (args if isinstance(batch, int) else tuple(x[:1] for x in args), shapes)
    return _phase(one, prices, "forward", 1, 0).ms


def _phase(graph: GraphModule, prices: Prices, phase: str, tokens: int, past: int) -> Roofline:
    costs = node_costs(graph, 1, tokens, past, rows=1)
    once = set(encoder_nodes(graph)) if past else set()  # of a source, and so in no step
    whole = sum(cost.weight_bytes for node, cost in costs.items() if node not in once)
    read_s = prices.seconds["cached_read_byte" if whole < _CACHED * cache_bytes() else "peak_read_byte"]
    found: dict[tuple[str, float, int], Layer] = {}
    for segment in segments(graph):
        nodes = [node for node in segment.nodes if node not in once]
        if not nodes:
            continue
        layer = _layer(_label(nodes, costs), [costs[node] for node in nodes], prices, read_s)
        key = (layer.name, layer.ops, layer.bytes)
        count = found[key].count + 1 if key in found else 1
        found[key] = Layer(layer.name, count, layer.ops, layer.bytes, layer.binds, layer.ms)
    ms = sum(layer.count * layer.ms for layer in found.values())
    return Roofline(phase, tokens, list(found.values()), ms, 1e3 * tokens / ms)


def _label(nodes: Iterable[Node], costs: Mapping[Node, NodeCost]) -> str:
    """Join the names of linears and embeddings, those of one module together, without the numbers of blocks."""
    leaves: dict[str, list[str]] = {}
    for node in nodes:
        if costs[node].kind in ("linear", "embedding"):
            weight = next(source for source in node.all_input_nodes if source.op == "get_attr")
            module = re.sub(r"\.(weight|codes)$", "", str(weight.target))
            parent, _, leaf = re.sub(r"\b\d+\b", "*", module).rpartition(".")
            leaves.setdefault(parent, []).append(leaf)
    parts = [(parent, ",".join(dict.fromkeys(names)), len(set(names)) > 1) for parent, names in leaves.items()]
    return " + ".join(
        f"{parent}{'.' if parent else ''}{f'{{{names}}}' if many else names}" for parent, names, many in parts
    )


def _op_seconds(name: str | None, seconds: Mapping[str, float]) -> float:
    """Return the least seconds of an operation of a layer's products in a format, or of floats."""
    fmt = Format.parse(name) if name else None
    if fmt is not None and fmt.integer_products:
        return seconds["peak_int8_op"]
    digits = fmt is not None and fmt.activations is None and fmt.element is None and not fmt.codebook
    return seconds.get("peak_digits_op", seconds["peak_flop"]) if digits else seconds["peak_flop"]


def _layer(name: str, costs: Iterable[NodeCost], prices: Prices, read_s: float) -> Layer:
    ops = seconds = 0.0
    bytes_ = 0
    for cost in costs:
        ops += cost.flops
        seconds += cost.flops * _op_seconds(cost.format, prices.seconds)
        bytes_ += cost.weight_bytes + cost.cache_bytes + (0 if cost.kind == "other" else cost.activation_bytes)
    reading = bytes_ * read_s
    return Layer(name, 1, ops, bytes_, "compute" if seconds > reading else "memory", 1e3 * max(seconds, reading))
