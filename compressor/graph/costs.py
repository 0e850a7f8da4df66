"""Count the operations and bytes of every node of a captured graph for concrete sizes, without running it.

Shapes come from the operators' fake kernels, so parameters may be on the meta device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from compressor.formats.format import Format
from compressor.formats.packing import PIECE_ELEMENTS
from compressor.graph.caches import empty_caches, empty_states
from compressor.graph.kinds.carried import KEPT
from compressor.graph.kinds.encoder_decoder import priced_source
from compressor.graph.model import ModelInfo

_OPS = torch.ops.compressor
_DENSE, _PACKED = _OPS.dense_linear.default, _OPS.packed_linear.default
_MASKED = _OPS.masked_attention.default
_ATTENTION = (_OPS.cached_attention.default, _OPS.packed_attention.default, *KEPT, _MASKED)
_EMBEDDING, _LOOKED_UP = torch.ops.aten.embedding.default, _OPS.packed_embedding.default
_CONVOLUTION = _OPS.causal_convolution.default
_STATE_OPS = {_CONVOLUTION: 2, _OPS.selective_scan.default: 6, _OPS.gated_delta_rule.default: 7, _OPS.wkv.default: 6}
"""Operations for each number of a state and each token; of convolutions, for each factor."""
_CALLS_A_TOKEN = 10  # of PyTorch's operators, in the definitions
_ROUTED = (_OPS.routed_linear.default, _OPS.packed_routed_linear.default)
_ROWS, _JOIN = _OPS.expert_rows.default, _OPS.join_experts.default
_DEPTHWISE = (_OPS.depthwise_linear.default, _OPS.packed_depthwise.default)
_PASSES: dict[Any, int] = {
    _OPS.rms_norm.default: 4,
    torch.ops.aten.layer_norm.default: 2,
}  # times that PyTorch reads and writes the rows
_PAIR_BYTES = 260  # scaling, masking and softmax of a query and key take as long as so much element-wise traffic
_UNPACKED_BYTES = 18  # a weight of a piece that is being dequantised


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """What one node computes, reads and writes.

    Attributes:
        kind: ``linear``, ``attention``, ``recurrence``, ``embedding`` or ``other``.
        flops: a multiplication and an addition are two.
        weight_bytes: of parameters, as they are stored (of an embedding, the rows that are read).
        cache_bytes: of keys and values of earlier tokens, or of the state that they left.
        activation_bytes: of all other inputs and outputs; 0 for views.
        held_bytes: new storage that the result takes.
        working_bytes: beyond inputs and result, while PyTorch runs it.
        weights: elements of a linear's weight.
        format: of a packed linear.
        cast: elements of a weight that PyTorch turns into float32 first.
        passes: element-wise traffic of PyTorch's eager operators, bytes.
        ours: an operator of Compressor's.
        owner: the node whose storage a view shows; None for what has storage of its own.
        calls: operators that PyTorch runs for it.
    """

    kind: str
    flops: float
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    held_bytes: int
    working_bytes: int
    weights: int
    format: str
    cast: int
    passes: int
    ours: bool
    owner: Node | None
    calls: int = 1


def node_costs(
    graph: GraphModule, batch: int, length: int, past: int = 0, rows: int | None = None
) -> dict[Node, NodeCost]:
    """Return the cost of every call in the graph.

    Args:
        batch, length: new tokens.
        past: tokens in the cache, and those of an encoder-decoder's source where there are any; else as many as new.
        rows: positions whose logits are wanted; all unless given.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run = _Shapes(graph, mode, past)
    run.run(*_inputs(graph, mode, batch, length, past, length if rows is None else rows), enable_io_processing=False)
    return run.costs


def _inputs(graph: GraphModule, mode: FakeTensorMode, batch: int, length: int, past: int, rows: int) -> list[Any]:
    info: ModelInfo = graph.meta["model"]
    if info.kind == "module":
        return [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in graph.meta["inputs"][0]]
    with mode:
        ids = torch.zeros(batch, length, dtype=torch.int64)
        if info.kind == "encoder":
            return [ids, torch.ones(batch, length)]
        kept = [*empty_caches(info, batch, max(1, past)), *empty_states(info, batch)]
        source = priced_source(info, batch, past or length)
        return [ids, torch.arange(length), torch.zeros(rows, dtype=torch.int64), *kept, *source]


class _Shapes(Interpreter):
    """Runs a graph on fake tensors and notes what each node costs."""

    def __init__(self, graph: GraphModule, mode: FakeTensorMode, past: int) -> None:
        super().__init__(graph)
        self.mode, self.past, self.costs = mode, past, dict[Node, NodeCost]()
        joins = graph.graph.find_nodes(op="call_function", target=_JOIN)
        self.experts = {linear.args[0]: len(join.args[1]) for join in joins for linear in join.args[1]}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake tensor in place of a parameter, whose values nobody needs."""
        held = super().get_attr(target, args, kwargs)
        with self.mode:
            return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="cpu")

    def run_node(self, n: Node) -> Any:
        """Run one node, and note its cost if it is a call."""
        with self.mode:
            result = self._expected_rows(n) if n.target is _ROWS else super().run_node(n)
        if n.op == "call_function":
            inputs = {source: self.env[source] for source in n.all_input_nodes}
            self.costs[n] = _cost(n, inputs, result, self.past)
        return result

    def _expected_rows(self, node: Node) -> Tensor:
        """Return the rows of one of several experts, as if all got equally many."""
        args: Any = node.args
        x, index = self.env[args[0]], self.env[args[1]]
        rows: Tensor = x.new_empty(max(1, -(-index.numel() // self.experts.get(node, 1))), x.shape[-1])
        return rows


def _cost(node: Node, inputs: Mapping[Node, Any], result: Any, past: int) -> NodeCost:
    """Return the cost of one call from the shapes of its inputs and of its result."""
    cost = _element_wise_cost(node, inputs, result)
    if node.target in (_DENSE, _PACKED, *_DEPTHWISE):
        return _linear_cost(cost, node, inputs, result)
    if node.target in _ROUTED:
        return _routed_cost(cost, node, inputs, result)
    if node.target in _ATTENTION:
        return _attention_cost(cost, node, inputs, past)
    if node.target in _STATE_OPS:
        return _recurrence_cost(cost, node, inputs, result)
    if node.target is _EMBEDDING:
        return dataclasses.replace(cost, kind="embedding", weight_bytes=_bytes(result))
    if node.target is _LOOKED_UP:
        args: Any = node.args
        read = inputs[args[0]].numel() * sum(_bytes(inputs[part]) for part in args[1]) // int(args[3])
        return dataclasses.replace(cost, kind="embedding", weight_bytes=read)
    return cost


def _element_wise_cost(node: Node, inputs: Mapping[Node, Any], result: Any) -> NodeCost:
    """Return the cost of an operator that does about one operation an element of its result."""
    tensors_in = [(source, x) for source, value in inputs.items() for x in _tensors(value)]
    tensors_out = list(_tensors(result))
    sources = {_storage(x): source for source, x in tensors_in}
    new_storage = {_storage(x): _bytes(x) for x in tensors_out if _storage(x) not in sources}
    held_bytes = sum(new_storage.values())
    moved = sum(_bytes(x) for source, x in tensors_in if source.op != "get_attr") + sum(map(_bytes, tensors_out))
    activation_bytes = moved if held_bytes else 0
    parameters = {source: _bytes(x) for source, x in tensors_in if source.op == "get_attr"}
    return NodeCost(
        kind="other",
        flops=float(sum(x.numel() for x in tensors_out)),
        weight_bytes=sum(parameters.values()),
        cache_bytes=0,
        activation_bytes=activation_bytes,
        held_bytes=held_bytes,
        working_bytes=0,
        weights=0,
        format="",
        cast=0,
        passes=_PASSES.get(node.target, 1) * activation_bytes,
        ours=getattr(node.target, "namespace", "") == "compressor",
        owner=next((sources[_storage(x)] for x in tensors_out if _storage(x) in sources), None),
    )


def _linear_cost(cost: NodeCost, node: Node, inputs: Mapping[Node, Any], result: Tensor) -> NodeCost:
    """Return the cost of a linear: its product, and the weight that PyTorch dequantises or turns into float32 first."""
    args: Any = node.args
    x = inputs[args[0]]
    outputs = result.shape[-1]
    is_depthwise = node.target in _DEPTHWISE  # each output has a row of its own taps alone
    weights = x.shape[-1] * (1 if is_depthwise else outputs)
    flops = 2.0 * x.numel() * (1 if is_depthwise else outputs)
    cost = dataclasses.replace(cost, kind="linear", flops=flops, weights=weights, passes=0)
    if node.target in (_DENSE, _DEPTHWISE[0]):
        if inputs[args[1]].dtype is torch.float32:
            return cost
        return dataclasses.replace(cost, cast=weights, working_bytes=4 * weights)
    fmt = str(args[-3])
    working_bytes = 4 * weights + _UNPACKED_BYTES * min(weights, PIECE_ELEMENTS)
    activations = Format.parse(fmt).activations
    if activations is None:
        return dataclasses.replace(cost, format=fmt, working_bytes=working_bytes)
    temporaries = 3 if activations.element is None else 6  # tensors like x, while PyTorch rounds it
    working_bytes += temporaries * 4 * x.numel()
    return dataclasses.replace(cost, format=fmt, working_bytes=working_bytes, passes=2 * temporaries * _bytes(x))


def _routed_cost(cost: NodeCost, node: Node, inputs: Mapping[Node, Any], result: Tensor) -> NodeCost:
    """Return the cost of a routed linear, which reads no more experts than there are pairs of token and expert."""
    args: Any = node.args
    pairs, is_packed = inputs[args[1]].numel(), node.target is _ROUTED[1]
    stored = [inputs[part] for part in (args[2] if is_packed else args[2:3])]
    read, columns = min(pairs, len(stored[0])), inputs[args[0]].shape[-1]
    weights = read * columns * result.shape[-1]
    return dataclasses.replace(
        cost,
        kind="linear",
        flops=2.0 * pairs * columns * result.shape[-1],
        weight_bytes=read * sum(map(_bytes, stored)) // len(stored[0]),
        weights=weights,
        format=str(args[4]) if is_packed else "",
        cast=0 if is_packed or stored[0].dtype is torch.float32 else weights,
        working_bytes=4 * columns * result.shape[-1],
        passes=0,
    )


def _attention_cost(cost: NodeCost, node: Node, inputs: Mapping[Node, Any], past: int) -> NodeCost:
    """Return the cost of attention over earlier and new tokens; queries are [batch, heads, length, width]."""
    args: Any = node.args
    queries = inputs[args[0]]
    keys = inputs[args[1]]
    batch, heads, length, width = queries.shape
    past = 0 if node.target is _MASKED else past
    tokens = past + keys.shape[2]
    pairs = batch * heads * length * tokens
    repeated_bytes = 2 * 4 * batch * heads * tokens * width  # keys and values, for every head that reads them
    return dataclasses.replace(
        cost,
        kind="attention",
        flops=4.0 * pairs * width,
        cache_bytes=2 * _bytes(keys[:, :, :1]) * past,
        activation_bytes=2 * _bytes(queries) + 2 * _bytes(keys),
        working_bytes=3 * 4 * pairs + repeated_bytes,
        passes=_PAIR_BYTES * pairs + 2 * repeated_bytes,
    )


def _recurrence_cost(cost: NodeCost, node: Node, inputs: Mapping[Node, Any], result: Any) -> NodeCost:
    """Return the cost of an operator with a state, its last operand, through which PyTorch goes token by token."""
    args: Any = node.args
    operations = _STATE_OPS[cast(OpOverload, node.target)]
    state, length = inputs[args[-1]], result[0].shape[1]
    touched = length * (
        state.numel() if node.target is not _CONVOLUTION else result[0].shape[0] * inputs[args[1]].numel()
    )
    return dataclasses.replace(
        cost,
        kind="recurrence",
        flops=float(operations * touched),
        cache_bytes=_bytes(state),
        passes=cost.passes + 2 * 4 * operations * touched,
        calls=_CALLS_A_TOKEN * length,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def eager_work(costs: Iterable[NodeCost]) -> dict[str, float]:
    """Return the work of running nodes in PyTorch once, by unit (:data:`compressor.plan.prices.UNITS`)."""
    work = dict.fromkeys(("matmul_flop", "dequantize_element", "stream_byte", "node", "custom_op"), 0.0)
    for cost in costs:
        if cost.kind in ("linear", "attention"):
            work["matmul_flop"] += cost.flops
        if cost.format:
            work["dequantize_element"] += cost.weights
        work["stream_byte"] += cost.passes + 6 * cost.cast
        work["node"] += cost.calls
        work["custom_op"] += cost.ours
    return work
