"""Give feed-forward networks a small one beside them, and a router that sends each token to one of them or past both.

    x -> network -> +      becomes      x -> router -> top 1 -> big, small or neither
                                        x -> network on the rows of big   -> +
                                          -> auxiliary on the rows of small -> +

Each linear of either network reads the rows of its tokens alone, as those of experts do
(:mod:`compressor.ops.experts`): a choice of 0 stands for it, -1 for none, whose outputs are zeros.  So kernels read no
weights that no token takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import one_hot

from compressor.graph.blocks import Branch, find_blocks
from compressor.graph.kinds.additions import CallBuilder
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import delete_parameter, set_parameter
from compressor.graph.sites import EXPERT, linear_sites

_ATEN, _OPS = torch.ops.aten, torch.ops.compressor
_DENSE, _ROWS, _JOIN = _OPS.dense_linear.default, _OPS.expert_rows.default, _OPS.join_experts.default
BIG, SMALL, NEITHER = range(3)
"""Places of a router's outputs."""
_LEAVES = ("router", "gate_proj", "up_proj", "down_proj")


class CannotRoute(Exception):
    """A network's tokens cannot be routed; says why."""


@dataclass(frozen=True)
class Network:
    """The feed-forward network of a block.

    Attributes:
        name: of its module.
        x: what its first linears read, [B, S, H].
        linears: its dense linears; the last gives what is added to the stream.
    """

    name: str
    x: Node
    linears: tuple[Node, ...]

    @property
    def last(self) -> Node:
        """The linear whose outputs are added to the stream."""
        return self.linears[-1]


def networks(graph: GraphModule, blocks: Sequence[int] | None = None) -> list[Network]:
    """List the feed-forward networks of a decoder's blocks.

    Args:
        blocks: numbers of blocks; None for all.
    Raises:
        CannotRoute: the model has no blocks, or not one of that number, or a network has another form.
    """
    found = find_blocks(graph)
    if graph.meta["model"].kind != "decoder" or not found:
        raise CannotRoute("it is not a decoder of transformer blocks")
    chosen = range(len(found)) if blocks is None else blocks
    if wrong := [index for index in chosen if not 0 <= index < len(found)]:
        raise CannotRoute(f"block {wrong[0]}: the model has blocks 0 to {len(found) - 1}")
    sites = {site.node: site for site in linear_sites(graph)}
    result = []
    for index in sorted(set(chosen)):
        branches = [branch for branch in found[index].branches if branch.part == "ffn"]
        if len(branches) != 1:
            raise CannotRoute(f"{found[index].name} has {len(branches)} feed-forward networks")
        result.append(_network(branches[0], sites))
    return result


def _network(branch: Branch, sites: dict[Node, Any]) -> Network:
    linears = [node for node in branch.nodes if node in sites]
    readers = {cast(Node, node.args[0]) for node in linears[:-1]}
    is_chain = len(linears) > 1 and len(readers) == 1 and not branch.terms and branch.sum in linears[-1].users
    if not is_chain or any(node.target in (_DENSE, _ROWS) and node not in linears for node in branch.nodes):
        raise CannotRoute(
            f"{branch.name} is not a feed-forward network: linears that read one value, and one linear behind them"
        )
    if any(sites[node].tied for node in linears):
        raise CannotRoute(f"{branch.name}: its linears share weights with others")
    return Network(branch.name, readers.pop(), tuple(linears))


def auxiliary_names(network: str) -> list[str]:
    """Return the names of what is added beside a network: the router's weight and bias, the small network's weights."""
    weights = [_weight(network, leaf) for leaf in _LEAVES]
    return [weights[0], weights[0].removesuffix("weight") + "bias", *weights[1:]]


def _weight(network: str, leaf: str) -> str:
    return f"{network}.auxiliary.{leaf}{'' if leaf == 'router' else '.0'}.weight"


def add_auxiliary(graph: GraphModule, blocks: Sequence[int] | None, width: int) -> list[str]:
    """Route the tokens of blocks' networks in place; return the networks' names.

    What is added (:func:`auxiliary_names`) is on the meta device.

    Args:
        blocks: as of :func:`networks`, which says what is refused.
        width: of the small networks.
    """
    found = networks(graph, blocks)
    for network in found:
        _route(graph, network, width)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [network.name for network in found]


def _route(graph: GraphModule, network: Network, width: int) -> None:
    given: Tensor = network.x.meta["val"]
    hidden, dtype = int(given.shape[-1]), network.last.args[1].meta["val"].dtype  # type: ignore[union-attr]
    build = CallBuilder(graph, f"{network.name}.auxiliary", network.linears[0], dtype)
    rows = build.call(_ATEN.view.default, network.x, [-1, hidden])
    sizes = [build.call(_ATEN.sym_size.int, network.x, axis) for axis in range(2)]
    bias = auxiliary_names(network.name)[1]
    set_parameter(graph, bias, torch.empty(3, dtype=torch.float32, device="meta"))
    router = build.linear(f"{network.name}.auxiliary.router", rows, 3, hidden, build.parameter(bias))
    choice = build.call(_OPS.top_k.default, router, 1)
    first, second = (build.call(_ATEN.lt.Scalar, choice, place) for place in (SMALL, NEITHER))
    first, second = (build.call(_ATEN.to.dtype, is_so, torch.int64) for is_so in (first, second))
    big = build.call(_ATEN.sub.Tensor, first, 1)
    small = build.call(_ATEN.sub.Tensor, build.call(_ATEN.sub.Tensor, second, first), 1)
    gate, up = (
        _expert(build, f"{network.name}.auxiliary.{leaf}.0", rows, small, width, hidden) for leaf in _LEAVES[1:3]
    )
    inner = build.call(_ATEN.mul.Tensor, build.call(_ATEN.silu.default, gate), up)
    made = _expert(build, f"{network.name}.auxiliary.down_proj.0", inner, small, hidden, width)
    beside = build.call(_ATEN.view.default, made, [*sizes, hidden])
    for node in network.linears:
        _route_linear(graph, node, big, sizes, beside if node is network.last else None)


def _expert(build: CallBuilder, name: str, x: Node, index: Node, rows: int, columns: int) -> Node:
    """Add a linear for the rows of tokens that take it."""
    taken = build.call(_ROWS, x, index, 0)
    made = build.linear(name, taken, rows, columns)
    made.meta["nn_module_stack"] = {name: (name, EXPERT)}
    return build.call(_JOIN, index, [made])


def _route_linear(graph: GraphModule, node: Node, index: Node, sizes: Sequence[Node], beside: Node | None) -> None:
    """Let a linear read the rows of tokens that take it; its outputs are zeros for others."""
    x, weight, bias = cast("tuple[Node, Node, Node | None]", node.args)
    rows, columns = graph.get_parameter(str(weight.target)).shape
    build = CallBuilder(graph, "", node, weight.meta["val"].dtype)
    stack = dict(node.meta.get("nn_module_stack", {}))
    name = f"{str(weight.target).removesuffix('.weight')}.0"

    def moved(source: Node) -> Node:
        leaf = str(source.target).rpartition(".")[2]
        set_parameter(graph, f"{name}.{leaf}", graph.get_parameter(str(source.target)).detach())
        return build.parameter(f"{name}.{leaf}")

    flat = build.call(_ATEN.view.default, x, [-1, columns])
    taken = build.call(_ROWS, flat, index, 0)
    made = build.call(_DENSE, taken, moved(weight), None if bias is None else moved(bias))
    made.meta["nn_module_stack"] = {**stack, name: (name, EXPERT)}
    joined = build.call(_JOIN, index, [made])
    result = build.call(_ATEN.view.default, joined, [*sizes, rows])
    result = result if beside is None else build.call(_ATEN.add.Tensor, result, beside)
    node.replace_all_uses_with(result)
    graph.graph.erase_node(node)
    for source in (weight, bias):
        if source is not None and not source.users:
            graph.graph.erase_node(source)
            delete_parameter(graph, str(source.target))


@dataclass(frozen=True)
class Routed:
    """A network whose tokens are routed.

    Attributes:
        name: of its module.
        router: the linear that chooses, [T, 3].
        big, small: what either network adds, [B, S, H].
        total: their sum.
        operations: multiply-adds a token of the router, the network and the small one.
    """

    name: str
    router: Node
    big: Node
    small: Node
    total: Node
    operations: tuple[int, int, int]

    @property
    def indices(self) -> tuple[Node, Node]:
        """Return which tokens take each network."""
        big, small = (cast(Node, cast(Node, part.args[0]).args[0]) for part in (self.big, self.small))
        return big, small


def routed_networks(graph: GraphModule) -> list[Routed]:
    """List the networks that :func:`add_auxiliary` gave routers, before their weights are packed."""
    read = {str(node.target): node for node in graph.graph.find_nodes(op="get_attr")}
    end, found = ".auxiliary.router.weight", []
    for name in [target.removesuffix(end) for target in read if target.endswith(end)]:
        node = read[_weight(name, "down_proj")]
        for _ in range(3):  # the linear, what joins its rows, and a view of that
            node = next(iter(node.users))
        total = next(iter(node.users))
        routed = Routed(name, next(iter(read[name + end].users)), cast(Node, total.args[0]), node, total, (0, 0, 0))
        joins = [user for index in routed.indices for user in index.users if user.target is _JOIN]
        router, counts = graph.get_parameter(name + end).numel(), dict.fromkeys(routed.indices, 0)
        for join in joins:
            (made,) = cast("list[Node]", join.args[1])
            counts[cast(Node, join.args[0])] += graph.get_parameter(str(cast(Node, made.args[1]).target)).numel()
        big, small = counts.values()
        found.append(replace(routed, operations=(router, big, small)))
    return found


def mixed_graph(graph: GraphModule) -> tuple[GraphModule, list[Node]]:
    """Return a copy that computes both networks for every token, and takes one by a choice that gradients pass through.

    Returns:
        the copy, and of each network nodes of the choice [T, 3] and of what either network makes, [B, S, H].
    """
    mixed, points = clone_graph(graph), list[Node]()
    for routed in routed_networks(mixed):
        with mixed.graph.inserting_after(routed.router):
            choice = mixed.graph.call_function(straight_choice, (routed.router,))
        with mixed.graph.inserting_before(routed.total):
            taken = mixed.graph.call_function(_mix, (choice, routed.big, routed.small))
        routed.total.replace_all_uses_with(taken)
        _for_all(mixed, routed)
        points += [choice, routed.big, routed.small]
    return _cleaned(mixed), points


def whole_graph(graph: GraphModule) -> GraphModule:
    """Return a copy whose tokens all take the networks themselves: the model as it was."""
    whole = clone_graph(graph)
    for routed in routed_networks(whole):
        routed.total.replace_all_uses_with(routed.big)
        _for_all(whole, routed)
    return _cleaned(whole)


def _for_all(graph: GraphModule, routed: Routed) -> None:
    """Let linears of a network read the rows of all tokens."""
    for user in [user for index in routed.indices for user in index.users]:
        if user.target not in (_ROWS, _JOIN):
            continue
        given = user.args[0] if user.target is _ROWS else cast("list[Node]", user.args[1])[0]
        with graph.graph.inserting_before(user):
            whole = graph.graph.call_function(_rows if user.target is _ROWS else _joined, (given,))
        user.replace_all_uses_with(whole)


def _cleaned(graph: GraphModule) -> GraphModule:
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _joined(rows: Tensor) -> Tensor:
    return rows[:, None]


def straight_choice(outputs: Tensor) -> Tensor:
    """Return 1 for the largest of a router's outputs and 0 for others, [T, 3]; of equal ones for the first.

    Gradients are those of the softmax (straight-through, arXiv:1308.3432).
    """
    chances = outputs.softmax(-1)
    return one_hot(outputs.argmax(-1), 3) + chances - chances.detach()


def _mix(choice: Tensor, big: Tensor, small: Tensor) -> Tensor:
    weights = choice.reshape(*big.shape[:-1], 3)
    return weights[..., BIG, None] * big + weights[..., SMALL, None] * small
