"""Train weights so that the model predicts what the dense one does (Hinton et al. 2015, arXiv 1503.02531)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.loop import Objective
from compressor.training.settings import Shape
from compressor.training.teacher import with_teacher
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import TrainingPass


@dataclass(frozen=True)
class Distill(TrainingPass, Pass):
    """Train weights so that the outputs come near to those of the dense model, the one before the first pass.

    The loss is the divergence of the predictions, softened by a temperature; an encoder's is the error of its hidden
    states.  No labels are needed, and each token teaches the whole distribution of its successor.
    Linears that are dense yet are trained in float32 by AdamW, and stored in the type that they had.  What is zero in
    them stays zero, so that pruning passes go in front, with ``pack: false``, and passes that pack behind.  A share of
    the samples is held out; the weights with the smallest loss there are kept, the first ones included.

    Attributes:
        temperature: logits are divided by it; above 1, unlikely tokens count for more.
        hidden: weight of the hidden states' error in the loss, at the places where only the residual stream is live,
            behind each attention and each feed-forward network; 0 leaves them out.
        steps: of the optimiser.
        batch: samples that run at once.
        accumulate: batches whose gradients are added up for one step.
        learning_rate: at its highest.
        schedule: how it falls to zero: ``cosine`` or ``linear``.
        warmup: share of the steps in which it rises.
        weight_decay: of matrices, times the learning rate a step.
        clip: largest norm of all gradients together.
        held_out: share of the samples that are not trained on.
        evaluate_every: steps between two looks at these.
        patience: looks without a smaller loss after which training ends; 0 goes on to the last step.
        checkpoint_every: steps between two states in the cache, from which a killed run goes on.
        vectors: train norms and biases too.
        tables: train embedding tables too; one that is tied to a linear is trained with it.
        targets: class names, module names or ``re:`` patterns of the linears to train.
        ignore: patterns of linears to leave as they are.
    """

    needs_dense: ClassVar[bool] = True
    temperature: float = 1.0
    hidden: float = 0.0
    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 3e-4
    schedule: Shape = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    held_out: float = 0.1
    evaluate_every: int = 25
    patience: int = 0
    checkpoint_every: int = 50
    vectors: bool = True
    tables: bool = False
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 100:
            raise UsageError(f"distill: temperature {self.temperature:g} is not above 0 and at most 100")
        if not 0 <= self.hidden <= 1e6:
            raise UsageError(f"distill: hidden {self.hidden:g} is not a weight from 0 to a million")
        super().__post_init__()

    def prepare(self, graph: GraphModule, ctx: Context, names: Sequence[str]) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance of its outputs to the dense model's."""
        return with_teacher(self.name, graph, ctx, names, self.temperature, self.hidden)
