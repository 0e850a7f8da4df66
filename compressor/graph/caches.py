"""Key-value caches and states of a captured decoder: their shapes, and how a pass changes the caches' format.

Caches come in as ``k_cache`` and ``v_cache``, new rows leave as outputs, and one attention operator a layer reads both.
States of recurrent layers come in as ``states``, behind the caches, and leave whole, behind the new rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.formats.cache import CacheFormat, cache_row
from compressor.graph.kinds.halves import needed_nodes
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import module_path
from compressor.graph.rewrite import set_parameter

_OPS = torch.ops.compressor
_PACK = _OPS.pack_cache.default
_PACKABLE = {_OPS.cached_attention.default: 10, _OPS.kept_attention.default: 11}
"""Arguments of attention over float32 caches that attention over packed ones has too; later ones must be absent."""
_PACKED = {
    _OPS.cached_attention.default: _OPS.packed_attention.default,
    _OPS.kept_attention.default: _OPS.packed_kept_attention.default,
}
_INPUTS = 3  # of a decoder, before its caches: ids, position, keep
_LISTS = 3  # results of a decoder before its states: logits, new keys, new values
_SIZE = torch.ops.aten.sym_size.int

Orders = tuple[Tensor, Tensor]
"""For keys and for values, int32 [Hkv, D]: which channel is stored at each place of a head's row."""


def empty_caches(info: ModelInfo, batch: int, capacity: int = 1) -> list[Tensor]:
    """Return empty caches of all layers, keys first, in the model's format, with room for ``capacity`` tokens."""
    kind, size = cache_row(info.cache_format, info.head_dim)
    dtype = getattr(torch, kind)
    return [torch.zeros(batch, heads, capacity, size, dtype=dtype) for heads in 2 * info.cache_heads]


def empty_states(info: ModelInfo, batch: int) -> list[Tensor]:
    """Return the states of recurrent layers before the first token."""
    return [torch.zeros(batch, *shape) for shape in info.states]


def empty_past(info: ModelInfo, batch: int, capacity: int = 1) -> list[list[Tensor]]:
    """Return the last arguments of a decoder's graph before the first token: keys, values, and states if it has any."""
    caches, states = empty_caches(info, batch, capacity), empty_states(info, batch)
    return [caches[: info.layers], caches[info.layers :], *([states] if states else [])]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention operator over float32 caches.

    Attributes:
        index: of its caches among those of all layers.
        name: of the module that it is in.
        node: the operator.
        queries: float32 [B, H, S, D], or [B, H, R, D] where it keeps R of the new tokens.
        keys, values: the new ones, float32 [B, Hkv, S, D].
    """

    index: int
    name: str
    node: Node
    queries: Node
    keys: Node
    values: Node

    @property
    def beyond_packed(self) -> tuple[Argument, ...]:
        """Return the arguments that attention over packed caches does not have."""
        return self.node.args[_PACKABLE[cast(OpOverload, self.node.target)] :]


def attention_layers(graph: GraphModule) -> list[AttentionLayer]:
    """List the layers whose caches are still float32, in dataflow order; several may share one."""
    caches = graph.graph.find_nodes(op="placeholder")[_INPUTS:]
    found = []
    for node in graph.graph.nodes:
        if node.target not in _PACKABLE:
            continue
        index = caches.index(node.args[3])
        name = module_path(node) or f"attention.{index}"
        queries, keys, values = cast(tuple[Node, ...], node.args[:3])
        found.append(AttentionLayer(index, name, node, queries, keys, values))
    return found


def restate_heads(graph: GraphModule) -> None:
    """Say in the model's facts how many heads each of its float32 caches has by now."""
    info: ModelInfo = graph.meta["model"]
    heads = list(info.cache_heads)
    for layer in attention_layers(graph):
        heads[layer.index] = int(layer.keys.meta["val"].shape[1])
    graph.meta["model"] = info.with_cache_heads(heads)


def pack_caches(graph: GraphModule, fmt: CacheFormat, orders: Mapping[int, Orders] | None) -> None:
    """Make every layer store its keys and values in a format.

    Args:
        orders: by the layers' indices, stored as parameters ``<layer>.k_order`` and ``.v_order``; None stores channels
            as they come.
    """
    info: ModelInfo = graph.meta["model"]
    caches, output = graph.graph.find_nodes(op="placeholder")[_INPUTS:], graph.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    made: dict[Node, tuple[Node, Node | None]] = {}  # by keys or values, which layers may share: packed, and the order
    for layer in attention_layers(graph):
        old = layer.node
        with graph.graph.inserting_before(old):
            for which, (kind, source) in enumerate((("k", layer.keys), ("v", layer.values))):
                if source in made:
                    continue
                order = None
                if orders is not None:
                    set_parameter(graph, f"{layer.name}.{kind}_order", orders[layer.index][which])
                    order = graph.graph.get_attr(f"{layer.name}.{kind}_order")
                packed = graph.graph.call_function(_PACK, (source, order, fmt.name))
                packed.meta = {**source.meta, "val": _packed(source.meta["val"], fmt)}
                made[source] = packed, order
                place = layer.index + which * info.layers
                results[1 + place] = packed
                caches[place].meta["val"] = _packed(caches[place].meta["val"], fmt)
            (keys, k_order), (values, v_order) = made[layer.keys], made[layer.values]
            operator = cast(OpOverload, old.target)
            args = (old.args[0], keys, values, *old.args[3 : _PACKABLE[operator]], k_order, v_order, fmt.name)
            new = graph.graph.call_function(_PACKED[operator], args)
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.graph.erase_node(old)
    output.args = (tuple(results),)
    graph.meta["model"] = dataclasses.replace(info, cache_format=fmt.name)
    graph.recompile()


def _packed(value: Tensor, fmt: CacheFormat) -> Tensor:
    """Return a fake tensor of packed rows in place of one of float32 channels."""
    return value.new_empty(*value.shape[:-1], fmt.row_bytes(value.shape[-1]), dtype=torch.uint8)


def drop_unread_caches(graph: GraphModule) -> None:
    """Remove the inputs for keys, values and states that the logits do not depend on any more, and the outputs for new
    ones, of a decoder or encoder-decoder; the others are counted anew.

    Raises:
        ValueError: sizes are read from caches, and none would be left.
    """
    info: ModelInfo = graph.meta["model"]
    inputs, output = graph.graph.find_nodes(op="placeholder"), graph.graph.output_node()
    results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    caches, count = 2 * info.layers, 2 * info.layers + len(info.states)
    live = needed_nodes([results[0]], set())
    read = [any(user in live and user.target is not _SIZE for user in node.users) for node in inputs[_INPUTS:]]
    kept = [layer for layer in range(info.layers) if read[layer] or read[layer + info.layers]]
    states = [number for number in range(len(info.states)) if read[caches + number]]
    places = [*kept, *(layer + info.layers for layer in kept), *(caches + number for number in states)]
    gone = set(range(count)).difference(places)
    if not gone:
        return
    output.args = (tuple(node for i, node in enumerate(results) if i - 1 not in gone),)
    graph.graph.eliminate_dead_code()
    for i in sorted(gone):
        _read_sizes_elsewhere(inputs[_INPUTS + i], [inputs[_INPUTS + place] for place in places])
        graph.graph.erase_node(inputs[_INPUTS + i])
    for place, layer in enumerate(kept):
        for which, name in enumerate(("k_cache", "v_cache")):
            inputs[_INPUTS + layer + which * info.layers].target = f"{name}_{place}"
    for place, number in enumerate(states):
        inputs[_INPUTS + caches + number].target = f"states_{place}"
    shapes = tuple(info.states[number] for number in states)
    heads = [info.cache_heads[layer] for layer in kept]
    graph.meta["model"] = dataclasses.replace(info.with_cache_heads(heads), states=shapes)
    _drop_leaves(graph, {_INPUTS + i for i in gone}, {1 + i for i in gone}, bool(states))
    graph.recompile()


def _read_sizes_elsewhere(unread: Node, others: list[Node]) -> None:
    """Read sizes of a cache that goes, of which all have the same but heads and width, from one that stays."""
    for user in list(unread.users):
        if not (alike := [node for node in others if _sizes(node) == _sizes(unread)]):
            raise ValueError(f"{user} reads a size of the last of the caches, {unread}")
        user.replace_input_with(unread, alike[0])


def _sizes(cache: Node) -> list[Any]:
    """Return the sizes of a cache that depend on the call: batch and tokens; of a state, all."""
    shape = list(cache.meta["val"].shape)
    return shape[::2] if len(shape) == 4 else shape


def _drop_leaves(graph: GraphModule, inputs: Collection[int], outputs: Collection[int], has_states: bool) -> None:
    """Make the forward take and return lists without some places, which are counted over all lists.

    Args:
        has_states: whether any are left; if not, the argument and the result for them go as well.
    """
    known = cast(_PyTreeCodeGen, graph.graph._codegen).pytree_info
    assert known.out_spec is not None

    def left(value: Any, gone: Collection[int]) -> Any:
        return [each for each in value if each not in gone] if isinstance(value, list) else value

    args, options = pytree.tree_unflatten(list(range(known.in_spec.num_leaves)), known.in_spec)
    results = pytree.tree_unflatten(list(range(known.out_spec.num_leaves)), known.out_spec)
    given = {name: left(value, inputs) for name, value in zip(known.orig_args, args, strict=True)}
    if not has_states:
        given.pop("states", None)
        results = results[:_LISTS]
    specs = tuple(given.values()), options
    returned = tuple(left(value, outputs) for value in results)
    info = _PyTreeInfo(list(given), pytree.tree_structure(specs), pytree.tree_structure(returned))
    graph.graph.set_codegen(_PyTreeCodeGen(info))
