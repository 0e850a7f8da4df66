"""Train weights so that the model predicts what the dense one does (Hinton et al. 2015, arXiv 1503.02531)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.host.digests import digest
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.blocks import BlockWalk, names_by_block
from compressor.training.device import Device
from compressor.training.settings import AdapterOptions, TeacherOptions, WeightOptions
from compressor.training.teacher import TaughtPass


@dataclass(frozen=True, kw_only=True)
class Distill(TeacherOptions, WeightOptions, AdapterOptions, TaughtPass, Pass):
    """Train weights so that the outputs come near to those of the dense model, the one before the first pass.

    The loss is the divergence of the predictions, softened by a temperature; an encoder's is the error of its hidden
    states.  No labels are needed, and each token teaches the whole distribution of its successor.
    Linears that are dense yet are trained in float32 by AdamW, and stored in the type that they had.  What is zero in
    them stays zero, so that pruning passes go in front, with ``pack: false``, and passes that pack behind.  A share of
    the samples is held out; the weights with the smallest loss there are kept, the first ones included.
    Hidden states are compared by the names of the linears in front of them.  Behind ``skip_layers``, then, each block
    that is left learns what it put out in the dense model: the one in front of a gap that state, and not the one behind
    the gap.  So blocks in front of the first gap are right as they begin; the one behind a gap reads what the blocks
    that are gone read, and can learn what they added; and the rule holds for halves of blocks and at both ends too.

    Attributes:
        by_block: train one block after the other, each for all ``steps``, towards the state behind the dense block of
            the same name; what several blocks read is left as it is.
    """

    learning_rate: float = 3e-4
    warmup: float = 0.1
    by_block: bool = False

    def __post_init__(self) -> None:
        if self.by_block and self.hidden:
            raise UsageError("distill: by_block compares hidden states alone; leave `hidden` out")
        super().__post_init__()

    def parts(self, graph: GraphModule, names: Sequence[str]) -> list[list[str]]:
        """Return the parameters of each block, or all.

        Raises:
            UsageError: each parameter is read by several blocks.
        """
        if not self.by_block:
            return super().parts(graph, names)
        parts = names_by_block(graph, names)
        if not any(parts):
            raise UsageError("distill: by_block: several blocks read each of the chosen weights; leave `by_block` out")
        return parts

    @property
    def less_memory(self) -> list[str]:
        """Return what takes less memory."""
        return super().less_memory + ([] if self.by_block else ["set `by_block: true`"])

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Train the model as a whole, or its blocks one by one."""
        if not self.by_block:
            return super().run(graph, ctx)
        ids, (sites, names) = ctx.calibration(self.name).ids, self.chosen(graph)
        assert isinstance(ids, Tensor)  # `requires` refuses models whose samples are not
        device, parts = Device(self.device), self.parts(graph, names)
        walk, figures = BlockWalk(self.name, graph, ctx, ids, device), []
        steps = self.steps * sum(map(bool, parts))
        with device.computing(self.name, self.less_memory), ctx.reporter.task(self.name, steps) as task:
            for number, part in enumerate(parts):
                if part:
                    mine = [site for site in sites if site.weight_name in part]
                    prepare = functools.partial(walk.block, number, part, self.temperature)
                    key = digest(self.key(ctx), str(number))
                    tensors, history = self.train(graph, ctx, mine, torch.arange(len(ids)), key, task, prepare)
                    self.replace(graph, ctx, mine, tensors)
                    figures.append((history.begun, history.best))
                    if history.why:
                        ctx.notes.append(f"{self.name}: block {number} ended after step {history.step}: {history.why}")
                walk.pass_by(number)
        begun, best = (" ".join(f"{figure:.3g}" for figure in column) for column in zip(*figures, strict=True))
        ctx.notes.append(f"{self.name}: held-out loss by block at first: {begun}; of what is kept: {best}")
        return graph
