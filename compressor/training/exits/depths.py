"""Depths that fall with the position: check them, find those that lose least, and gate a graph's blocks by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.exits.gates import gate_blocks, gated_blocks
from compressor.graph.exits.logits import CannotExit
from compressor.graph.model import ModelInfo, clone_graph
from compressor.numerics.depth.schedules import Schedule, block_ends, linear_schedule, mean_blocks, why_wrong
from compressor.pipeline.context import Context
from compressor.training.objectives.losses import next_token_loss
from compressor.training.trainable import TrainableGraph

_BEGINS = (0.0, 0.25, 0.5)
"""Where depths begin to fall, as shares of the positions."""


def check_depths(graph: GraphModule, pass_name: str, depths: Schedule | None, first: int) -> None:
    """Refuse a model whose blocks cannot be left out, and depths that it does not have.

    Raises:
        UsageError: says which.
    """
    info: ModelInfo = graph.meta["model"]
    if info.exits is not None:
        raise UsageError(f"{pass_name}: tokens leave {info.name} by early_exit already; leave one of the passes out")
    try:
        blocks = len(gated_blocks(graph))
    except CannotExit as error:
        raise UsageError(f"{pass_name}: {error}") from error
    if first >= blocks:
        raise UsageError(f"{pass_name}: first {first}: the model has {blocks} blocks; let one at least be left out")
    if depths is not None and (reason := why_wrong(depths, blocks, first)):
        raise UsageError(f"{pass_name}: depths: {reason}")


def set_depths(graph: GraphModule, depths: Schedule, first: int) -> None:
    """Gate the blocks of a graph, and state in the facts about the model where each ends."""
    info: ModelInfo = graph.meta["model"]
    ends = block_ends(depths, len(gated_blocks(graph)), first)
    gate_blocks(graph, ends)
    graph.meta["model"] = dataclasses.replace(info, depths=tuple(ends), speculates=True)


def find_depths(graph: GraphModule, ctx: Context, pass_name: str, cost: float, first: int, tried: int) -> Schedule:
    """Return the depths of a cost that lose least on calibration samples, and note what others lose.

    Args:
        cost: the largest mean share of the blocks that the positions of a sample run.
        first: blocks that always run.
        tried: samples that they are tried on.
    Raises:
        UsageError: no depths cost so little.
    """
    ids, blocks = ctx.calibration(pass_name).ids, len(gated_blocks(graph))
    assert isinstance(ids, Tensor)  # the samples of decoders are
    positions, samples = ids.shape[1], ids[:tried]
    found = candidates(blocks, first, cost, positions)
    if not found:
        least = mean_blocks(linear_schedule(blocks, max(1, first), 0, 0), positions) / blocks
        raise UsageError(
            f"{pass_name}: cost {cost:g}: with {max(1, first)} of {blocks} blocks at least, {positions} positions cost "
            f"{least:.3g} or more; raise it"
        )
    whole = schedule_loss(graph, ((0, blocks),), first, samples)
    losses = []
    with ctx.reporter.task(pass_name, len(found)) as task:
        for schedule in found:
            losses.append(schedule_loss(graph, schedule, first, samples))
            task.advance()
    best = min(range(len(found)), key=losses.__getitem__)
    shown = ", ".join(f"{count} from {position}" for position, count in found[best])
    ctx.notes.append(
        f"{pass_name}: blocks by position: {shown}; {mean_blocks(found[best], positions) / blocks:.3f} of all in "
        f"{positions} positions; loss on the samples {losses[best]:.4f}, of {len(found)} schedules tried up to "
        f"{max(losses):.4f}, with all blocks {whole:.4f}"
    )
    return found[best]


def candidates(blocks: int, first: int, cost: float, positions: int) -> list[Schedule]:
    """List depths of a cost, each falling along a line: for each least depth and beginning, the slowest fall.

    Args:
        blocks: of the model.
        first: blocks that always run.
        cost: the largest mean share of the blocks that tokens at the first ``positions`` run.
    """
    found: dict[Schedule, None] = {}
    for least in range(blocks - 1, max(1, first) - 1, -1):
        for share in _BEGINS:
            begin = int(share * positions)
            falls = (linear_schedule(blocks, least, begin, end) for end in range(positions, begin - 1, -1))
            fits = (schedule for schedule in falls if mean_blocks(schedule, positions) <= cost * blocks)
            if (schedule := next(fits, None)) is not None:
                found[schedule] = None
    return list(found)


@torch.no_grad()
def schedule_loss(graph: GraphModule, depths: Schedule, first: int, samples: Sequence[Tensor] | Tensor) -> float:
    """Return the mean loss of next tokens, in nats, of a model whose tokens run fewer blocks.

    Args:
        graph: without gates; it stays as it is.
        samples: int64 [n, S].
    """
    gated = clone_graph(graph)
    gate_blocks(gated, block_ends(depths, len(gated_blocks(gated)), first))
    run = TrainableGraph(gated)
    return sum(float(next_token_loss(run(sample[None]).last, sample[None])) for sample in samples) / len(samples)
