"""Give a decoder heads that draft the tokens after the next one, for `speculate: heads`.

Medusa (Cai et al. 2024, arXiv 2401.10774) has a head for each further token, which sees the last hidden state alone.
Here all heads also see the token that was chosen behind it, as the first head of Hydra (Ankner et al. 2024, arXiv
2402.05109) does: it is known when they are asked.  All tokens are drafted by one call, and by one reading of the
model's own last linear.  The graph is drawn in :mod:`compressor.graph.kinds.draft_heads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.graph.kinds.draft_heads import CannotHead, add_heads, head_weights
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.heads import agreement, begin_heads, heads_loss
from compressor.training.settings import split
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.training_pass import AddingPass

_RANKS = (1, 4)  # of candidates, whose accuracy is reported


@dataclass(frozen=True, kw_only=True)
class DraftHeads(AddingPass, Pass):
    """Train heads that draft further tokens from the model's last hidden states; the model itself stays as it is.

    The target is the model's own distribution of each token, on the calibration samples.  Heads share the last linear,
    so that each adds 3 * width * channels weights.  Passes that pack weights come behind; those that change the model,
    in front.  A share of the samples is held out; the weights with the smallest loss there are kept, and how often each
    head's likeliest tokens are the model's is reported for them.

    Attributes:
        heads: tokens that are drafted behind the next one.
        width: hidden channels of each head.
    """

    heads: int = 3
    width: int = 256
    steps: int = 250
    batch: int = 4
    learning_rate: float = 1e-2
    evaluate_every: int = 50

    adds: ClassVar[str] = "added: it drafts"

    def __post_init__(self) -> None:
        for name, most in (("heads", 15), ("width", 10**6)):
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"draft_heads: {name} {getattr(self, name)} is not a whole number from 1 to {most}")
        super().__post_init__()

    @property
    def less_memory(self) -> list[str]:
        """Return what takes less memory."""
        return [super().less_memory[0], "lower `heads` or `width`"]

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models that draft nothing, and whose last linear or table the heads cannot share."""
        info: ModelInfo = graph.meta["model"]
        if not info.speculates:
            raise UsageError("draft_heads: only drafts read the heads; give `speculate: heads` in the recipe as well")
        super().requires(graph, ctx)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Add heads, train them, and say how often they are right."""
        ids = ctx.calibration(self.name).ids
        assert isinstance(ids, Tensor)  # a decoder's are
        if ids.shape[1] <= self.heads + 1:
            raise UsageError(
                f"draft_heads: samples of {ids.shape[1]} tokens teach {self.heads} heads nothing; give longer ones"
            )
        begin_heads(graph, self.add(graph), ids, ctx.seed)
        graph = super().run(graph, ctx)
        held_out, _ = split(ids, self.held_out, ctx.seed)
        model = TrainableGraph(graph, (), [_drafts(graph)], Device(self.device))
        for head, (first, among) in enumerate(agreement(model, held_out, self.batch, _RANKS), 1):
            ctx.notes.append(
                f"draft_heads: head {head}: the model's likeliest token is its own in {first:.1%}, and among its "
                f"{_RANKS[1]} likeliest in {among:.1%}, on held-out samples"
            )
        return graph

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance of the heads' predictions to the model's."""

        def objective(_batch: Tensor, outputs: Outputs, _step: int) -> Tensor:
            return heads_loss(outputs.hidden[0], outputs.last.detach())

        return TrainableGraph(graph, names, [_drafts(graph)], device), objective

    def added(self, graph: GraphModule) -> list[str]:
        """Return the names of the heads' weights."""
        return head_weights(graph)

    def add(self, graph: GraphModule) -> list[str]:
        """Add the heads; return the names of their weights."""
        try:
            return add_heads(graph, self.heads, self.width)
        except CannotHead as error:
            raise UsageError(f"draft_heads: {error}") from error


def _drafts(graph: GraphModule) -> Node:
    found: Node = graph.graph.output_node().args[0][-1]  # type: ignore[index, assignment]
    return found
