"""The loss of exits: each predicts what the whole model does, which stays near what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.exits.logits import exit_blocks
from compressor.graph.model import clone_graph
from compressor.training.device import Device
from compressor.training.exits.layer_skip import Curriculum, SkippingGraph, active_exits, exit_shares
from compressor.training.loop import Objective
from compressor.training.objectives.losses import divergence
from compressor.training.trainable import Outputs, TrainableGraph


@dataclass(frozen=True)
class ExitPlan:
    """Say how exits are trained; each field has the meaning of the option of `early_exit`.

    Attributes:
        exits: numbers of blocks in front of each.
    Raises:
        UsageError: a number is out of its range.
    """

    exits: Sequence[int]
    dropout: float
    scale: float
    curriculum: Curriculum
    steps: int

    def __post_init__(self) -> None:
        if not self.exits or min(self.exits) < 1 or any(later <= first for first, later in pairwise(self.exits)):
            shown = ", ".join(map(str, self.exits)) or "none"
            raise UsageError(f"early_exit: exits {shown}: give a number from 1, or numbers of blocks that rise")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"early_exit: dropout {self.dropout:g} is not a probability from 0 to below 1")
        if not 0 < self.scale <= 1e6:
            raise UsageError(f"early_exit: exit_scale {self.scale:g} is not a weight above 0, up to a million")


def exit_training(
    graph: GraphModule, names: Sequence[str], plan: ExitPlan, seed: int, device: Device
) -> tuple[SkippingGraph, Objective]:
    """Return a graph to train with exits, and its loss.

    The loss is the weighted mean (:func:`compressor.training.exits.layer_skip.exit_shares`) of the divergence of each
    exit's predictions from the whole model's, through which gradients go to both, and of the whole model's from those
    it made before.  LayerSkip has the text's next tokens in the place of both; what is to be kept here is the model,
    and what an exit is asked for is to agree with it.

    Args:
        names: parameters to train.
        seed: of what samples leave out.
    """
    before = TrainableGraph(clone_graph(graph), (), (), device)
    model = SkippingGraph(graph, names, plan.exits, plan.dropout, seed, device)
    exits, blocks = plan.exits, len(exit_blocks(graph))
    shares = exit_shares(exits, blocks, plan.scale)

    def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
        with torch.no_grad():
            wanted = before(batch).last
        trains = torch.is_grad_enabled()
        active = active_exits(plan.curriculum, exits, blocks, step, plan.steps) if trains else [True] * len(exits)
        weights = [share for share, is_on in zip(shares, active, strict=False) if is_on]
        losses = [divergence(rows, outputs.last, 1.0) for rows, on in zip(outputs.hidden, active, strict=True) if on]
        weights.append(shares[-1])
        losses.append(divergence(outputs.last, wanted, 1.0))
        total = sum(weights)
        return torch.stack([loss * (weight / total) for loss, weight in zip(losses, weights, strict=True)]).sum()

    return model, objective
