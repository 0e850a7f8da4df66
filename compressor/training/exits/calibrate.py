"""Calibrate exits on held-out samples, and say what they are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.exits.logits import exit_blocks
from compressor.graph.model import ExitInfo, ModelInfo
from compressor.numerics.depth.thresholds import NEVER, choose_giving_up, choose_thresholds, outcome
from compressor.pipeline.context import Context
from compressor.training.exits.measure import ExitFigures, head_cost, measure_exits

Action: TypeAlias = Literal["exit", "stop", "both", "draft"]
"""Choices that confidence makes: whether a token leaves, whether a text is given up, or both; none where exits only
draft."""


@dataclass(frozen=True)
class Wanted:
    """Say what thresholds are to keep; each field has the meaning of the option of `early_exit`.

    Raises:
        UsageError: a number is out of its range.
    """

    agreement: float
    action: Action
    hopeless: float
    window: int

    def __post_init__(self) -> None:
        for name in ("agreement", "hopeless"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"early_exit: {name} {getattr(self, name):g} is not a share from 0 to 1")
        if not 1 <= self.window <= 1024:
            raise UsageError(f"early_exit: window {self.window} is not a number of tokens from 1 to 1024")


def set_exits(
    graph: GraphModule, ctx: Context, exits: Sequence[int], before: ExitFigures, held_out: Tensor, wanted: Wanted
) -> None:
    """Choose thresholds, and state them in the facts about the model; note what exits are like before and now.

    Half of the samples chooses, and the other half checks.  Exits that only draft have no thresholds.

    Args:
        exits: numbers of blocks in front of each.
        before: their figures before the training.
        held_out: samples that nothing was trained on.
    """
    figures, blocks = measure_exits(graph, exits, held_out), len(exit_blocks(graph))
    half = (len(held_out) + 1) // 2
    ours, others = figures.part(slice(half)), figures.part(slice(half, None))
    ctx.notes += _compared(exits, blocks, before, figures)
    if wanted.action == "draft":
        return
    thresholds, head, give_up = (NEVER,) * len(exits), head_cost(graph), 0.0
    if wanted.action != "stop":
        confidence, agrees = ours.confidence.flatten(1), ours.agrees.flatten(1)
        thresholds = choose_thresholds(confidence, agrees, exits, blocks, wanted.agreement)
        for count, threshold in zip(exits, thresholds, strict=True):
            if threshold > 1:
                ctx.notes.append(
                    f"early_exit: after {count} of {blocks} blocks no threshold keeps an agreement of "
                    f"{wanted.agreement:g} and saves blocks: no token leaves there; train for longer, or lower "
                    "`agreement`"
                )
        checked = {"the samples that chose them": ours} | ({"others": others} if len(held_out) > 1 else {})
        ctx.notes.append(_kept(thresholds, exits, blocks, head, checked))
    if wanted.action != "exit":
        give_up = choose_giving_up(ours.confidence[0], ours.right, wanted.window, wanted.hopeless)
        ctx.notes.append(_given_up(give_up, wanted, figures))
    state_exits(graph, exits, thresholds, give_up, wanted.window)


def state_exits(
    graph: GraphModule,
    exits: Sequence[int],
    thresholds: Sequence[float] | None = None,
    give_up: float = 0.0,
    window: int = 1,
) -> None:
    """State exits in the facts about a model.

    Args:
        thresholds: None while they are unknown.
    """
    info: ModelInfo = graph.meta["model"]
    least, blocks = tuple(thresholds or (NEVER,) * len(exits)), len(exit_blocks(graph))
    told = ExitInfo(tuple(exits), least, give_up, window, head_cost(graph), blocks)
    graph.meta["model"] = dataclasses.replace(info, exits=told, speculates=True)


def _compared(exits: Sequence[int], blocks: int, before: ExitFigures, now: ExitFigures) -> list[str]:
    """Say how each exit, and the whole model, was and is on held-out samples."""
    lines = []
    for place, count in enumerate(exits):
        lines.append(
            f"early_exit: after {count} of {blocks} blocks, on held-out samples: agreement with the whole model "
            f"{before.agreement[place]:.3f}, now {now.agreement[place]:.3f}; loss {before.losses[place]:.3f}, now "
            f"{now.losses[place]:.3f}"
        )
    return [*lines, f"early_exit: loss of the whole model {before.losses[-1]:.3f}, now {now.losses[-1]:.3f}"]


def _kept(
    thresholds: Sequence[float], exits: Sequence[int], blocks: int, head: float, checked: dict[str, ExitFigures]
) -> str:
    """Say what thresholds do on samples."""
    parts = []
    for what, figures in checked.items():
        found = outcome(figures.confidence.flatten(1), figures.agrees.flatten(1), exits, blocks, thresholds)
        cost = found.blocks + head * found.heads
        parts.append(
            f"on {what} {found.agreement:.3f} of the tokens agree, {found.blocks:.2f} blocks a token, with heads "
            f"{cost:.2f} of {blocks + head:.2f}"
        )
    shown = ", ".join("never" if value > 1 else f"{value:.3f}" for value in thresholds)
    return f"early_exit: thresholds {shown}: {'; '.join(parts)}"


def _given_up(threshold: float, wanted: Wanted, figures: ExitFigures) -> str:
    """Say where texts are given up."""
    if not threshold:
        return (
            f"early_exit: no mean confidence of {wanted.window} tokens is so low that at most {wanted.hopeless:g} of "
            "them are right: no text is given up; raise `hopeless`"
        )
    means = figures.confidence[0].double().unfold(1, wanted.window, 1).mean(2)
    right = figures.right.double().unfold(1, wanted.window, 1).mean(2)
    below = means < threshold
    return (
        f"early_exit: a text ends below a mean confidence of {threshold:.3f} in {wanted.window} tokens: on held-out "
        f"samples {float(below.double().mean()):.3f} of all places, where {float(right[below].mean()):.3f} of the "
        f"tokens are right, {float(right.mean()):.3f} everywhere"
    )
