"""Rewrite a captured graph: set parameters, pack linears, insert packed linears, drop what is dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.graph.sites import _PACKED, PACKED_FORM, Site, calls_again


def set_parameter(graph: GraphModule, name: str, value: Tensor) -> None:
    """Create or replace a parameter (no gradient) under a dotted name, and the modules on the way."""
    path, _, leaf = name.rpartition(".")
    module: nn.Module = graph
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False))


def held_tensor(graph: GraphModule, name: str) -> Tensor:
    """Return a parameter or buffer by its dotted name."""
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(graph.get_submodule(path), leaf)
    return found


def set_tensor(graph: GraphModule, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by another tensor, and leave it the kind that it is."""
    path, _, leaf = name.rpartition(".")
    module = graph.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        set_parameter(graph, name, value)


def replace_linear(graph: GraphModule, site: Site, packed: PackedWeight) -> None:
    """Make a site use a packed weight, stored as parameters ``<site>.codes``, ``<site>.scales``...

    The module's code stays as it is until the caller is done and calls ``graph.recompile()``: torch.fx keeps the source
    of every version, and one for each linear would take more memory than the weights.

    Later calls of the same module read the packed weight too, unless it has the scale of one call's input: what is
    stored once stays so.  The dense weight goes when nothing else uses it.  The site's node is gone afterwards.  Other
    sites can still be replaced, but the ``input`` of one that reads this node's output directly is stale: list the
    sites again.

    Raises:
        ValueError: the packed weight has another shape.
    """
    if packed.shape != (site.out_features, site.in_features):
        raise ValueError(f"{site.name} is {site.out_features} x {site.in_features}, the packed weight {packed.shape}")
    old = site.node
    weight, bias = cast(Node, old.args[1]), old.args[2]
    with graph.graph.inserting_before(old):
        new = call_packed(graph, site.name, cast(Node, old.args[0]), packed, bias)
    new.target, new.meta = PACKED_FORM[old.target], dict(old.meta)
    for call in calls_again(old) if not packed.format.has_input_scale else ():
        call.target, call.args = new.target, (call.args[0], new.args[1], call.args[2], *new.args[3:])
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    if not weight.users:
        graph.graph.erase_node(weight)
        delete_parameter(graph, site.weight_name)


def replace_weight(graph: GraphModule, site: Site, weight: Tensor) -> None:
    """Make a site use another dense weight, stored as its own ``<site>.weight`` if other nodes read the old one."""
    if not site.tied:
        set_parameter(graph, site.weight_name, weight)
        return
    name = f"{site.name}.weight"
    set_parameter(graph, name, weight)
    with graph.graph.inserting_before(site.node):
        site.node.update_arg(1, graph.graph.get_attr(name))


def call_packed(graph: GraphModule, name: str, x: Node, packed: PackedWeight, bias: Any) -> Node:
    """Add a packed linear at the point of insertion, with its parameters ``<name>.codes``, ``<name>.scales``..."""
    stored = store_parts(graph, name, packed)
    out_features, in_features = packed.shape
    return graph.graph.call_function(_PACKED, (x, stored, bias, packed.format.name, in_features, out_features))


def store_parts(graph: GraphModule, name: str, packed: PackedWeight) -> list[Node]:
    """Store a packed weight as ``<name>.codes``, ``<name>.scales``..., and return the nodes that read them."""
    for part, value in packed.parts.items():
        set_parameter(graph, f"{name}.{part}", value)
    return [graph.graph.get_attr(f"{name}.{part}") for part in packed.parts]


def drop_dead_parameters(graph: GraphModule) -> list[str]:
    """Remove nodes without users and then parameters and buffers that no node reads; their names."""
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.graph.erase_node(node)
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    held = [*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False)]
    dead = [name for name, _ in held if name not in used]
    for name in dead:
        delete_parameter(graph, name)
    graph.recompile()
    return dead


def delete_parameter(graph: GraphModule, name: str) -> None:
    """Remove a parameter, and the modules that hold nothing without it."""
    path, _, leaf = name.rpartition(".")
    delattr(graph.get_submodule(path), leaf)
    while path and not list(graph.get_submodule(path).parameters()) and not list(graph.get_submodule(path).buffers()):
        path, _, leaf = path.rpartition(".")
        delattr(graph.get_submodule(path), leaf)


def packed_weight(graph: GraphModule, site: Site) -> PackedWeight:
    """Return the weight of one of :func:`compressor.graph.sites.packed_sites`."""
    args: Any = site.node.args
    parts = [graph.get_parameter(node.target).detach() for node in args[1]]
    return PackedWeight.of(parts, Format.parse(str(args[3])), (site.out_features, site.in_features))


def replace_packed(graph: GraphModule, site: Site, packed: PackedWeight) -> None:
    """Store the packed weight of one of :func:`compressor.graph.sites.packed_sites` in another format.

    Where other calls read it too, they keep it, and this one gets its own.
    """
    args: Any = site.node.args
    name, shared = site.weight_name.removesuffix(".codes"), any(len(part.users) > 1 for part in args[1])
    call = site.name.rpartition("@")[2] if "@" in site.name else "1"
    with graph.graph.inserting_before(site.node):
        stored = store_parts(graph, f"{name}@{call}" if shared else name, packed)
    site.node.args = (args[0], stored, args[2], packed.format.name, *args[4:])
    for old in args[1]:
        if old.users:
            continue
        graph.graph.erase_node(old)
        if old.target.rpartition(".")[2] not in packed.parts or shared:
            delete_parameter(graph, old.target)


def set_bias(graph: GraphModule, site: Site, bias: Tensor) -> None:
    """Give one of :func:`compressor.graph.sites.packed_sites` another bias, float32 [out], or its first:
    ``<site>.bias``.
    """
    name = site.bias_name or f"{site.name}.bias"
    set_parameter(graph, name, bias)
    if site.bias_name is None:
        with graph.graph.inserting_before(site.node):
            site.node.update_arg(2, graph.graph.get_attr(name))


def insert_packed(graph: GraphModule, name: str, x: Node, packed: PackedWeight, users: Sequence[Node] = ()) -> None:
    """Send a tensor through a packed linear, stored under ``name``, on its way to all its users or to some of them.

    Args:
        x: float32 [..., n]; the packed weight is [n, n].
        users: none means all.
    """
    with graph.graph.inserting_before(x.next):
        new = call_packed(graph, name, x, packed, None)
    new.meta = {"val": x.meta["val"]}
    x.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and (not users or user in users))


def call_before(graph: Graph, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call in front of a node with a fake tensor, whose provenance it gets; its value is that of its inputs'."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    given = map_arg((args, kwargs), lambda source: source.meta["val"])
    with before.meta["val"].fake_mode:
        node.meta = {**before.meta, "val": target(*given[0], **given[1])}
    return node
