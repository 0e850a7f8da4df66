"""Find a model's transformer blocks, and the branches in them that add something to the residual stream.

    stream -> norm -> attention -> + -> norm -> linears -> +     a block of two branches, one behind the other
         '-> norm -> attention, linears -> + ->                  or added at once

Between two branches one token-dependent tensor is live, the residual stream (:mod:`compressor.graph.segments`), and a
branch is an addition to it.  Where a norm follows each sum, as in BERT, or a ReLU, as in ResNets, it belongs to the
branch in front of it.  Convolutions whose shortcut changes the stream, as it gets smaller, are a branch that stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.caches import drop_unread_caches
from compressor.graph.kinds.branch_parts import ATTENTION, Part, mixes_tokens, part_of
from compressor.graph.kinds.halves import needed_nodes
from compressor.graph.provenance import describe, module_path
from compressor.graph.residual import carried, is_sum
from compressor.graph.rewrite import drop_dead_parameters
from compressor.graph.segments import narrow_points, token_nodes
from compressor.graph.sites import PACKED_FORM

_LINEAR = (*PACKED_FORM, *PACKED_FORM.values())


@dataclass(frozen=True)
class Branch:
    """One addition to the residual stream.

    Attributes:
        part: ``attention`` where it mixes tokens: it holds an attention operator or a recurrent one; ``convolution``
            where it looks at patches of images; else ``ffn``.
        entry: the stream in front of it.
        exit: the stream behind it, which has the entry's shape; a norm's output where one follows each sum.
        sum: what the addition gives.
        terms: what it adds, where the other part is added at once; empty where it adds all that is added there.
        nodes: what computes it, in order; with the other part where both are added at once.
        crosses: its keys and values are those of another stream: cross-attention.
        name: of the module that its linears are in, or several: ``model.layers.3.mlp``.
        reason: why it cannot be left out; empty if it can.
    """

    part: Part
    entry: Node
    exit: Node
    sum: Node
    terms: tuple[Node, ...]
    nodes: tuple[Node, ...]
    crosses: bool
    name: str
    reason: str = ""


class Together:
    """Branches that go together.

    Attributes:
        branches: in order.
    """

    branches: tuple[Branch, ...]

    @property
    def entry(self) -> Node:
        """Return the residual stream in front of them."""
        return self.branches[0].entry

    @property
    def exit(self) -> Node:
        """Return the residual stream behind them."""
        return self.branches[-1].exit

    @property
    def reason(self) -> str:
        """Say why they cannot be left out; an empty text if they can."""
        return next((branch.reason for branch in self.branches if branch.reason), "")


@dataclass(frozen=True)
class Block(Together):
    """A transformer block: a branch that mixes tokens, with the others around it up to the next one.

    Attributes:
        index: among the blocks of the model.
        stream: number of the residual stream; an encoder-decoder has two.
        branches: in order.
        name: ``model.layers.3``.
    """

    index: int
    stream: int
    branches: tuple[Branch, ...]
    name: str


def find_blocks(graph: GraphModule) -> list[Block]:
    """List the transformer blocks, in dataflow order; none where several tensors are live all the way."""
    blocks: list[Block] = []
    for stream, branches in enumerate(_streams(graph)):
        for group in _grouped(branches):
            name = _common(node for branch in group for node in branch.nodes)
            blocks.append(Block(len(blocks), stream, tuple(group), name))
    return blocks


def remove_branches(graph: GraphModule, gone: Sequence[Branch]) -> None:
    """Leave branches of a graph out: the stream behind each is the stream in front of it.

    Parameters that nothing else reads go, and so do keys, values and states with their places among inputs and outputs.

    Args:
        gone: as :func:`find_blocks` lists them for this graph; none has a reason to stay.
    """
    by_sum: dict[Node, list[Branch]] = {}
    for branch in gone:
        by_sum.setdefault(branch.sum, []).append(branch)
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    moved: dict[Node, Node] = {}  # the stream behind what has gone -> in front of it
    for total, (branch, *others) in sorted(by_sum.items(), key=lambda item: order[item[0]]):
        entry = moved.get(branch.entry, branch.entry)
        terms = {term for each in (branch, *others) for term in each.terms}
        if terms and not _leaves(total, entry) <= {entry, *terms}:
            left = _without(total, entry, terms)
            assert left is not None
            total.replace_all_uses_with(left)
            moved[total] = left
        else:
            branch.exit.replace_all_uses_with(entry)
            moved[branch.exit] = entry
    if graph.meta["model"].generates:
        drop_unread_caches(graph)
    drop_dead_parameters(graph)


def _leaves(node: Node, entry: Node) -> set[Node]:
    """Return what a sum over several additions adds up."""
    if node is entry or not is_sum(node):
        return {node}
    return {leaf for source in node.all_input_nodes for leaf in _leaves(source, entry)}


def _without(node: Node, entry: Node, terms: set[Node]) -> Node | None:
    """Return a sum over several additions without some of its terms; None if nothing is left."""
    if node is entry or node in terms or not is_sum(node):
        return None if node in terms else node
    first, second = (_without(source, entry, terms) for source in cast("tuple[Node, Node]", node.args))
    if first is None or second is None:
        return first or second
    node.args = (first, second)
    return node


def _grouped(branches: Sequence[Branch]) -> Iterator[list[Branch]]:
    """Part a stream's branches into blocks.

    A block begins at each branch that mixes the stream's own tokens, or as many branches earlier as stand in front of
    the first of these; where none does, each branch is one.
    """
    mixers = [i for i, branch in enumerate(branches) if branch.part == "attention" and not branch.crosses]
    starts = range(len(branches))
    if mixers:
        before = [0, *(i + 1 for i in mixers)]
        starts = [max(i - mixers[0], least) for i, least in zip(mixers, before, strict=False)]  # type: ignore[assignment]
    together = [i for i in starts if not (i and branches[i].sum is branches[i - 1].sum)]  # added at once
    for begin, end in pairwise([*together, len(branches)]):
        yield list(branches[begin:end])


def _streams(graph: GraphModule) -> list[list[Branch]]:
    """Return the branches of each residual stream: a stream ends where more than norms stand between two branches."""
    nodes = token_nodes(graph)
    inside = set(nodes)
    streams: list[list[list[Branch]]] = []
    tails: dict[Part, list[Any]] = {}
    for step in _steps(graph, nodes):
        behind = streams[-1][-1] if streams else None
        tail = None if behind is None else _tail(behind[0].sum, step[0].entry, inside)
        if behind is None or tail is None:
            _end(streams, tails, inside)
            streams.append([step])
            tails = {}
            continue
        streams[-1][-1] = [replace(branch, exit=step[0].entry, nodes=(*branch.nodes, *tail)) for branch in behind]
        tails[behind[0].part] = [node.target for node in tail]
        streams[-1].append(step)
    _end(streams, tails, inside)
    return [[_checked(graph, branch) for step in stream for branch in step] for stream in streams]


def _steps(graph: GraphModule, nodes: list[Node]) -> Iterator[list[Branch]]:
    """Yield the branches of each sum that adds something to a tensor that alone was live."""
    index = {node: i for i, node in enumerate(nodes)}
    points = dict.fromkeys(node for _, node in narrow_points(graph, nodes))
    outputs = [node for node in graph.graph.output_node().all_input_nodes[:1] if node in index]
    for entry, total in pairwise([*points, *(node for node in outputs if node not in points)]):
        between = nodes[index[entry] + 1 : index[total] + 1]
        if any(node.target in _LINEAR for node in between):
            yield from _branches(entry, total, between)


def _branches(entry: Node, total: Node, between: list[Node]) -> Iterator[list[Branch]]:
    """Yield what is added to ``entry`` to make ``total``: nothing if it is not a sum of it and what depends on it."""
    inside, terms, pure, reached = set(between), list[Node](), True, False
    ahead = [total]
    while ahead:
        node = ahead.pop()
        sources = carried(node) if node in inside else []
        if node is entry:
            reached = True
        elif not sources:
            terms.append(node)
        else:
            pure = pure and is_sum(node) and (node is total or len(node.users) == 1)
            ahead += sources
    whole = _branch(entry, total, between, ())
    changes = is_sum(total) and all(entry in needed_nodes([term], {entry}) for term in terms)  # the shortcut does
    if not reached and changes and whole.part == "convolution":
        yield [replace(whole, reason="its shortcut changes what is in front of it")]
    if not reached or not any(term in inside for term in terms):
        return
    if pure and all(term in inside and len(term.users) == 1 for term in terms):
        mixing = {term for term in terms if mixes_tokens(_cones((term,), between))}
        if 0 < len(mixing) < len(terms):
            rest = tuple(term for term in terms if term not in mixing)
            split = (tuple(term for term in terms if term in mixing), rest)
            yield [_branch(entry, total, _cones(part, between), part) for part in split]
            return
    yield [whole]


def _branch(entry: Node, total: Node, nodes: Sequence[Node], terms: tuple[Node, ...]) -> Branch:
    behind = _descendants(entry, nodes)
    mixers = [node for node in nodes if node.target in ATTENTION]
    keys = [arg for node in mixers for arg in node.args[1:2] if isinstance(arg, Node)]
    crosses = bool(mixers) and all(key not in behind for key in keys)
    return Branch(part_of(nodes), entry, total, total, terms, tuple(nodes), crosses, _common(nodes))


def _descendants(entry: Node, nodes: Sequence[Node]) -> set[Node]:
    found = {entry}
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _cones(terms: Sequence[Node], between: Sequence[Node]) -> list[Node]:
    """Return the nodes among some that several of them depend on, themselves included, in order."""
    wanted = set(terms)
    for node in reversed(between):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [node for node in between if node in wanted]


def _tail(total: Node, entry: Node, inside: set[Node]) -> list[Node] | None:
    """Return the operators without weights of a linear between a sum and the next entry; None where there is more."""
    found: list[Node] = []
    node = entry
    while node is not total:
        sources = {source for source in node.all_input_nodes if source in inside}
        if len(sources) != 1 or node.target in _LINEAR or _shape(node) != _shape(total):
            return None
        found.insert(0, node)
        node = sources.pop()
    return found


def _end(streams: list[list[list[Branch]]], tails: dict[Part, list[Any]], inside: set[Node]) -> None:
    """Give the last branch of a stream the norm behind it that others of its part have."""
    if not streams:
        return
    last = streams[-1][-1]
    exit_node, reason, tail = last[0].sum, "", list[Node]()
    for target in tails.get(last[0].part, ()):
        users = [user for user in exit_node.users if user in inside]
        if len(users) != 1 or users[0].target is not target:
            reason = f"other than behind those before it, no {getattr(target, '_opname', target)} follows it"
            break
        exit_node = users[0]
        tail.append(exit_node)
    streams[-1][-1] = [replace(b, exit=exit_node, nodes=(*b.nodes, *tail), reason=reason) for b in last]


def _checked(graph: GraphModule, branch: Branch) -> Branch:
    """Say why a branch cannot be left out: it changes the stream's shape, or the model returns a value of it."""
    if branch.reason:
        return branch
    reason = ""
    if _shape(branch.entry) != _shape(branch.exit):
        reason = f"it turns {_shape(branch.entry)} into {_shape(branch.exit)}"
    info, output = graph.meta["model"], graph.graph.output_node()
    results: Any = output.args[0]
    returned = [results] if isinstance(results, Node) else list(results[:1] if info.generates else results)
    for node in branch.nodes:
        if node is not branch.exit and node is not branch.sum and node in returned:
            reason = f"the model returns its {describe(node)}"
    return replace(branch, reason=reason)


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""


def _common(nodes: Any) -> str:
    """Return the path of the module that all linears among some nodes are in; several are named by the ends."""
    paths = [module_path(node).split(".") for node in nodes if node.target in _LINEAR]
    paths = [path for path in paths if path != [""]]
    if not paths:
        return ""
    shared = list(paths[0])
    for path in paths:
        equal = [one == other for one, other in zip(shared, path, strict=False)]
        shared = shared[: [*equal, False].index(False)]
    following = [path[len(shared)] for path in paths if len(path) > len(shared)]
    if len(set(following)) > 1 and all(each.isdecimal() for each in following):
        numbers = [int(each) for each in following]
        return ".".join([*shared, f"{min(numbers)}-{max(numbers)}"])
    return ".".join(shared)
