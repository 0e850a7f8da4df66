"""Let blocks of a decoder end at a position: from there on, tokens pass them by.

    stream -> attention -> x gate -> + -> network -> x gate -> +        gate: 1 in front of the block's end, else 0

A gate is 1 or 0, so in front of the end every bit stays, and behind it the stream is what it was in front of the block:
whoever runs one token at a time need not run the block at all.  Ends that fall from each block to the next later one
that stays (:mod:`compressor.numerics.depth.schedules`) keep caches whole: a token that runs a block sees only tokens
that ran it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from compressor.graph.blocks import Block
from compressor.graph.exits.logits import CannotExit, exit_blocks
from compressor.graph.residual import is_sum

_ATEN = torch.ops.aten


def gated_blocks(graph: GraphModule) -> list[Block]:
    """Return the blocks of a decoder, all of which add to the residual stream and do nothing else to it.

    Raises:
        CannotExit: one of them does more, or tokens of the model cannot leave it early.
    """
    blocks = exit_blocks(graph)
    for block in blocks:
        for branch in block.branches:
            if branch.exit is not branch.sum:
                raise CannotExit(f"a norm follows the sum behind {block.name}, which tokens that pass it by lack")
    return blocks


def gate_blocks(graph: GraphModule, ends: Sequence[int | None]) -> None:
    """Multiply what blocks add by their gates.

    Args:
        graph: for which :func:`gated_blocks` finds nothing; it changes in place.
        ends: of each block, the first position whose token passes it by; None where all run it.
    """
    position = next(node for node in graph.graph.find_nodes(op="placeholder") if node.target == "position")
    for block, end in zip(gated_blocks(graph), ends, strict=True):
        if end is None:
            continue
        first = min(branch.nodes[0] for branch in block.branches)
        with graph.graph.inserting_before(first):
            gate = _gate(graph, position, end)
        done: set[Node] = set()
        for branch in block.branches:
            if branch.sum not in done:
                done.add(branch.sum)
                _gate_terms(graph, branch.sum, branch.entry, gate)
    graph.recompile()


def _gate(graph: GraphModule, position: Node, end: int) -> Node:
    """Compute 1 for tokens in front of a position and 0 for others, float32 [1, S, 1]."""
    given = position.meta["val"]
    steps = (
        (_ATEN.lt.Scalar, (end,), given < end),
        (_ATEN.to.dtype, (torch.float32,), (given < end).to(torch.float32)),
        (_ATEN.unsqueeze.default, (0,), given[None].to(torch.float32)),
        (_ATEN.unsqueeze.default, (2,), given[None, :, None].to(torch.float32)),
    )
    node = position
    for operator, arguments, value in steps:
        node = graph.graph.call_function(operator, (node, *arguments))
        node.meta["val"] = value
    return node


def _gate_terms(graph: GraphModule, total: Node, entry: Node, gate: Node) -> None:
    """Multiply all that a sum adds to the stream by a gate."""
    for term in [*total.all_input_nodes]:
        if term is entry:
            continue
        if is_sum(term) and _reaches(term, entry):
            _gate_terms(graph, term, entry, gate)
            continue
        with graph.graph.inserting_before(total):
            gated = graph.graph.call_function(_ATEN.mul.Tensor, (term, gate))
        gated.meta = dict(term.meta)
        total.replace_input_with(term, gated)


def _reaches(node: Node, entry: Node) -> bool:
    """Return whether the stream is among what additions add up."""
    return any(source is entry or (is_sum(source) and _reaches(source, entry)) for source in node.all_input_nodes)
