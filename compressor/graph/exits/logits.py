"""Copy a decoder's final norm and head behind some of its blocks, and let samples of a batch skip blocks in training.

stream -> block 0 -> block 1 -> block 2 -> norm -> head -> logits
                            '-> norm -> head -> logits of the exit behind two blocks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from compressor.graph.blocks import Block, find_blocks
from compressor.graph.kinds.carried import KEPT
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.segments import token_nodes

SKIPS = "skips_block_"
"""Attributes of a graph that skips: with the block's number, bool [B, 1, 1], true for samples that leave it out."""


class CannotExit(Exception):
    """A model's tokens cannot leave behind a block; the message says why."""


def exit_blocks(graph: GraphModule) -> list[Block]:
    """Return a decoder's blocks, one behind the other.

    Raises:
        CannotExit: it is not a decoder, has fewer than two, or states, or cannot be cut between them.
    """
    info: ModelInfo = graph.meta["model"]
    if info.kind != "decoder":
        raise CannotExit(f"{info.name} is not a decoder of text, whose tokens could leave early; leave the pass out")
    if info.states:
        raise CannotExit(
            f"{info.name} has recurrent layers, whose states need every token; tokens cannot leave in front of them"
        )
    if info.depths is not None:
        raise CannotExit(f"tokens of {info.name} run fewer blocks by skip_decode already; leave one of the passes out")
    if info.predicts:
        raise CannotExit("a small model predicts its prompts' caches; leave predict_kv or this pass out")
    if any(node.target in KEPT for node in graph.graph.nodes):
        raise CannotExit("later layers run kept tokens alone; leave swift_kv or this pass out")
    blocks = find_blocks(graph)
    if len(blocks) < 2 or blocks[-1].stream:
        has = "do not add to one residual stream" if len(blocks) > 1 else f"are {len(blocks)}"
        raise CannotExit(f"the blocks of {info.name} {has}; tokens leave between two that do")
    for block in blocks:
        if block.exit.meta["val"].shape[-1] != blocks[-1].exit.meta["val"].shape[-1]:
            raise CannotExit(f"the stream behind {block.name} has another width than the one the head reads")
    head_nodes(graph, blocks[-1].exit)
    return blocks


def with_exits(graph: GraphModule, exits: Sequence[int], skips: bool = False) -> tuple[GraphModule, list[Node]]:
    """Copy a graph, and return with it the nodes of its logits behind so many blocks.

    Args:
        graph: a decoder; it stays as it is, and shares its parameters with the copy.
        exits: numbers of blocks that run in front of each exit, from 1 to all of them.
        skips: let samples of a batch pass blocks by: behind each block but the first, the stream is what it was in
            front for samples whose place in the attribute :data:`SKIPS` is true.
    Returns:
        The copy, and for each exit a node, float32 [B, R, V], where the model's own logits are [B, R, V].
    Raises:
        CannotExit: as :func:`exit_blocks` does.
    """
    streams = [(block.entry.name, block.exit.name) for block in exit_blocks(graph)]
    copied = clone_graph(graph)
    named = {node.name: node for node in copied.graph.nodes}
    behind = [named[stream] for _, stream in streams]
    tail = head_nodes(copied, behind[-1])
    if skips:
        behind = _let_samples_skip(copied, [(named[entry], named[exit]) for entry, exit in streams])
    logits, found = tail[-1], list[Node]()
    for count in exits:
        known = {behind[-1]: behind[count - 1]}
        if count == len(behind):
            found.append(logits)
            continue

        def own(arg: Node, known: dict[Node, Node] = known) -> Node:
            return known.get(arg, arg)

        with copied.graph.inserting_before(copied.graph.output_node()):
            for node in tail:
                known[node] = copied.graph.node_copy(node, own)
        found.append(known[logits])
    copied.recompile()
    return copied, found


def _let_samples_skip(graph: GraphModule, streams: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Let samples pass all blocks but the first by; return the stream behind each block.

    Args:
        streams: in front of each block, and behind it.
    """
    behind = [streams[0][1]]
    for number, (_, exit_node) in enumerate(streams[1:], 1):
        name, users = f"{SKIPS}{number}", [*exit_node.users]
        graph.register_buffer(name, torch.zeros(1, 1, 1, dtype=torch.bool), persistent=False)
        with graph.graph.inserting_after(exit_node):
            skip = graph.graph.get_attr(name)
        with graph.graph.inserting_after(skip):
            left = graph.graph.call_function(torch.ops.aten.where.self, (skip, behind[-1], exit_node))
        left.meta = dict(exit_node.meta)
        for user in users:
            user.replace_input_with(exit_node, left)
        behind.append(left)
    return behind


def head_nodes(graph: GraphModule, stream: Node) -> list[Node]:
    """Return the nodes between the stream behind the last block and the logits, in order: norm and head.

    Raises:
        CannotExit: they read another token-dependent value.
    """
    inside, wanted = set(token_nodes(graph)), [graph.graph.output_node().args[0][0]]  # type: ignore[index]
    found: set[Node] = set()
    while wanted:
        node = wanted.pop()
        if not isinstance(node, Node) or node is stream or node not in inside or node in found:
            continue
        found.add(node)
        wanted += node.all_input_nodes
    ordered = [node for node in graph.graph.nodes if node in found]
    before = {source for node in ordered for source in node.all_input_nodes} & inside - found
    if before != {stream}:
        odd = next((node.name for node in ordered if not found.isdisjoint(node.all_input_nodes)), "nothing")
        raise CannotExit(f"the head reads more than the stream behind the last block ({odd})")
    return ordered
