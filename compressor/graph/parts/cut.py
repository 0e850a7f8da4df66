"""Cut the graph that verifies tokens where one tensor alone is live, the residual stream.

    begin: ids, position, ...       -> stream, what the others share (tables of positions)
    part:  stream, shared, caches   -> stream                                                one for each stretch
    end:   stream, keep             -> logits

A part may be left out, the rows of a part may have come from different calls, and ``end`` may follow any of them: the
stream has one shape.  Only values of positions cross a cut beside it, and ``begin`` computes them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from compressor.graph.blocks import Block, Branch, find_blocks
from compressor.graph.kinds.halves import copy_calls, needed_nodes
from compressor.graph.kinds.token_trees import tree_graph
from compressor.graph.segments import token_nodes

BEGIN, END, STREAM, LOGITS = "begin", "end", "stream", "logits"
"""Names of the first and the last part, and of values between them."""
_ATEN = torch.ops.aten
_SIZE = _ATEN.sym_size.int
_VIEWS = (_ATEN.unsqueeze.default, _ATEN.view.default, _ATEN.expand.default, _ATEN.transpose.int, _ATEN.permute.default)


@dataclass(frozen=True)
class Part:
    """A stretch of the graph.

    Attributes:
        name: ``begin``, ``end``, or what the stretch holds: ``attention_3``, ``ffn_3``, or ``rest``.
        graph: computes it; its arguments are tensors in a row.
        takes: their names: those of the graph that verifies, ``stream``, or of values that ``begin`` gives.
        gives: names of its results.
        axes: of the results, the one along which tokens lie; -1 where a result is the same for all.
    """

    name: str
    graph: GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    axes: tuple[int, ...]

    def facts(self) -> dict[str, Any]:
        """Return what a bundle says of it."""
        return {
            "entry": self.name,
            "takes": list(self.takes),
            "gives": list(self.gives),
            "axes": list(self.axes),
        }


def why_no_parts(graph: GraphModule, first_blocks: int) -> str:
    """Say why a decoder that verifies tokens cannot be cut; an empty text where it can.

    Args:
        first_blocks: as of :func:`cut_graph`.
    """
    blocks = find_blocks(graph)
    if len(blocks) < 2:
        return "it has no two blocks that add to one residual stream, and drafts of its own layers leave some out"
    if blocks[-1].stream:
        return "it has several residual streams, and drafts of its own layers go along one"
    if first_blocks >= len(blocks):
        return f"it has {len(blocks)} blocks, and a draft has at least one less: give 1 to {len(blocks) - 1}"
    return next((f"{block.name}: {block.reason}" for block in blocks if block.reason), "")


def cut_graph(graph: GraphModule, first_blocks: int, stages: Sequence[int] = ()) -> list[Part]:
    """Return the parts of what verifies a decoder's tokens, which share its parameters, in order.

    Args:
        graph: a decoder for which neither :func:`~compressor.graph.kinds.token_trees.why_no_trees` nor
            :func:`why_no_parts` finds anything; it stays as it is.
        first_blocks: blocks in the first part, the others being one; 0 for a part of each half of a block.
        stages: in place of that, how many blocks run in front of each cut; parts are called ``stage_0`` and so on.
    """
    blocks = find_blocks(graph)
    points, names = _points(blocks, first_blocks)
    if stages:
        points = [blocks[0].entry, *(blocks[count].entry for count in stages), blocks[-1].exit]
        names = [f"stage_{number}" for number in range(len(stages) + 1)]
    tree = tree_graph(graph)
    by_name = {node.name: node for node in tree.graph.nodes}
    stops: list[Node] = [by_name[point.name] for point in points]
    results: Any = tree.graph.output_node().args[0]
    logits: Node = results[0]
    stretches = list(pairwise([None, *stops, logits]))
    shared = _shared(tree, [(start, stop) for start, stop in stretches if start is not None and stop is not None])
    handed = {node: f"shared_{number}" for number, node in enumerate(shared)}
    found = []
    for name, (start, stop) in zip((BEGIN, *names, END), stretches, strict=True):
        assert stop is not None
        gives = [stop, *(shared if start is None else ())]
        found.append(_part(tree, name, start, gives, {} if start is None else handed, stop is logits))
    return found


def _points(blocks: Sequence[Block], first_blocks: int) -> tuple[list[Node], list[str]]:
    """Return the tensors between parts, and the names of the parts between two of them."""
    steps: dict[Node, list[Branch]] = {}  # branches that are added at once are one step
    for block in blocks:
        for branch in block.branches:
            steps.setdefault(branch.exit, []).append(branch)
    if first_blocks:
        return [blocks[first_blocks].entry, blocks[-1].exit], ["rest"]
    names = []
    for block in blocks:
        own = [exit_node for exit_node in dict.fromkeys(branch.exit for branch in block.branches)]
        for number, exit_node in enumerate(own):
            parts = {branch.part for branch in steps[exit_node]}
            kind = "block" if len(parts) > 1 else parts.pop()
            twice = sum(steps[other][0].part == kind for other in own[:number])
            names.append(f"{kind}_{block.index}{'b' * twice}")
    return [blocks[0].entry, *steps], names


def _shared(tree: GraphModule, stretches: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Return the tensors of positions, no tokens, that stretches behind the first read, in order."""
    own, wanted = set(token_nodes(tree)), set[Node]()
    of_inputs = set(tree.graph.find_nodes(op="placeholder"))
    for node in tree.graph.nodes:
        if node.op == "call_function" and any(source in of_inputs for source in node.all_input_nodes):
            of_inputs.add(node)
    for start, stop in stretches:
        inside = needed_nodes([stop], {start})
        for node in inside & own - {start}:
            for source in node.all_input_nodes:
                while source.target in _VIEWS and source not in own:  # each part makes its own: it costs nothing
                    source = source.all_input_nodes[0]
                is_tensor = source.op == "call_function" and isinstance(source.meta.get("val"), Tensor)
                wanted.update({source} if is_tensor and source in of_inputs - own else ())
    return [node for node in tree.graph.nodes if node in wanted]


def _part(
    tree: GraphModule, name: str, start: Node | None, gives: list[Node], handed: dict[Node, str], is_end: bool
) -> Part:
    """Copy one stretch, with the inputs that it reads."""
    given = {*handed} | ({start} if start is not None else set())
    needed = needed_nodes(gives, given)
    inputs = [
        node
        for node in tree.graph.find_nodes(op="placeholder")
        if any(user in needed and user not in given and user.target is not _SIZE for user in node.users)
    ]
    taken = {node: str(node.target) for node in inputs}
    taken |= {} if start is None else {start: STREAM}
    taken |= {node: label for node, label in handed.items() if node in needed}
    nodes, env = fx.Graph(), dict[Node, Any]()
    for node, label in taken.items():
        env[node] = nodes.placeholder(label)
        env[node].meta = dict(node.meta)
    batch = str(tree.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0])
    for node in needed:
        if node.target is _SIZE and str(node.meta["val"]) in (batch, "1"):
            env[node] = 1  # tokens lie in one row, and caches have another first size here
    copy_calls(tree, nodes, env, needed)
    nodes.output(tuple(env[node] for node in gives) if len(gives) > 1 else env[gives[0]])
    graph = GraphModule(tree, nodes, class_name=type(tree).__name__)
    graph.meta.update(tree.meta)
    results = (LOGITS if is_end else STREAM, *(f"shared_{number}" for number in range(len(gives) - 1)))
    tokens = str(tree.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1])
    axes = ([*map(str, node.meta["val"].shape), tokens].index(tokens) for node in gives)
    found = tuple(axis if axis < node.meta["val"].dim() else -1 for axis, node in zip(axes, gives, strict=True))
    return Part(name, graph, tuple(taken.values()), results, (1,) if is_end else found)
