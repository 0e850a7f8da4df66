"""Count the memory that alternatives of a network of images take while they run, as the target's programs plan it.

    stem | block | block | ... | head      between two of them one tensor alone is live, whatever stands in a block,
     '--- the largest of all ---'          so a network's peak is the largest of its parts'

A whole program's plan may hold a little more, where it keeps memory for a later value of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.graph.blocks import Branch, find_blocks
from compressor.graph.parts.stretches import stretch_graph
from compressor.pipeline.context import Context, PeakBytes
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.structured.architecture import Picks, alike, built
from compressor.pipeline.structured.costs.times import Costing
from compressor.search.programme import Peak


def memory_counter(ctx: Context, pass_name: str) -> PeakBytes:
    """Return what counts memory.

    Raises:
        UsageError: nothing here does.
    """
    if ctx.peak_bytes is None:
        raise UsageError(
            f"{pass_name}: peak_memory: what kernels hold is not known here; compress through compressor.compress or "
            "the command line, or limit weight_bytes or parameters"
        )
    return ctx.peak_bytes


def peaks(graph: GraphModule, ctx: Context, given: Costing, most: float) -> Peak:
    """Return the limit of memory, in bytes of activations that are held at once.

    Args:
        most: bytes.
    Raises:
        UsageError: nothing here counts memory.
    """
    count, groups = memory_counter(ctx, given.pass_name), alike(graph, given.layers, given.space)

    def make() -> dict[str, torch.Tensor]:
        wanted = [(row, label) for row, members in enumerate(groups) for label in _labels(given, members)]
        changed = dict[str, tuple[GraphModule, list[Branch]]]()
        found, rest = [[0.0] * len(wanted), [0.0]]
        with ctx.reporter.task("count memory", len(wanted) + 1) as task:
            whole = built(graph, given.pass_name, given.whole, given.fmt)
            rest[0] = float(max(count(part, with_inputs) for part, with_inputs in _beside(whole)))
            task.advance()
            for place, (row, label) in enumerate(wanted):
                found[place] = _of_one(graph, count, given, groups[row][0], label, changed)
                task.advance()
        return {"found": torch.tensor(found, dtype=torch.float64), "rest": torch.tensor(rest, dtype=torch.float64)}

    known = cached_tensors(graph, ctx, given.pass_name, given.key(ctx, "peaks"), make)
    flat, sizes = iter(known["found"].tolist()), [[0.0] * len(row) for row in given.space]
    for members in groups:
        by_label = {label: next(flat) for label in _labels(given, members)}
        for i in members:
            sizes[i] = [by_label[one.label] for one in given.space[i]]
    return Peak(sizes, float(known["rest"]), most, " bytes")


def _labels(given: Costing, members: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(one.label for i in members for one in given.space[i]))


def _of_one(
    graph: GraphModule,
    count: PeakBytes,
    given: Costing,
    place: int,
    label: str,
    changed: dict[str, tuple[GraphModule, list[Branch]]],
) -> float:
    """Return the bytes of one sub-layer's alternative.

    Args:
        changed: graphs with an alternative wherever there is one of its label, and their branches, kept for others.
    """
    one = next((one for one in given.space[place] if one.label == label), None)
    if one is None or not one.stays:  # of those alike, it is another's that goes: what is in front of it stays
        return float(_bytes(given.layers[place].branch.entry))
    if label not in changed:
        picks = [next((one for one in row if one.label == label and one.stays), row[0]) for row in given.space]
        new = built(graph, given.pass_name, picks, given.fmt)
        changed[label] = new, [branch for block in find_blocks(new) for branch in block.branches]
    new, branches = changed[label]
    branch = branches[place]
    return float(count(stretch_graph(new, branch.entry, branch.exit), True))


def _beside(graph: GraphModule) -> list[tuple[GraphModule, bool]]:
    """Return the stretches beside the sub-layers, and whether their inputs count: the model's own are the caller's."""
    branches = [branch for block in find_blocks(graph) for branch in block.branches]
    ends: list[tuple[Node | None, Node | None]] = [(None, branches[0].entry)]
    ends += [(one.exit, other.entry) for one, other in pairwise(branches)]
    ends.append((branches[-1].exit, None))
    return [(stretch_graph(graph, *each), each[0] is not None) for each in ends if each[0] is not each[1]]


def _bytes(node: Node) -> int:
    """Return the bytes of a tensor of one image, or of a fixed batch."""
    value: torch.Tensor = node.meta["val"]
    return prod(size if isinstance(size, int) else 1 for size in value.shape) * value.element_size()


def held_bytes(graph: GraphModule, ctx: Context, given: Costing, picks: Picks) -> int:
    """Return the bytes that an architecture's program holds at once as a whole."""
    return memory_counter(ctx, given.pass_name)(built(graph, given.pass_name, picks, given.fmt), False)
