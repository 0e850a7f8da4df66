"""Train weights on the next tokens of the calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.device import Device, DeviceName
from compressor.training.loop import Objective
from compressor.training.losses import next_token_loss
from compressor.training.settings import Shape
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.training_pass import TrainingPass


@dataclass(frozen=True)
class Finetune(TrainingPass, Pass):
    """Train weights to predict the next tokens of the calibration samples; `distill` learns more from as many.

    Linears that are dense yet are trained in float32 by AdamW, and stored in the type that they had.  What is zero in
    them stays zero, so that pruning passes go in front, with ``pack: false``, and passes that pack behind.  A share of
    the samples is held out; the weights with the smallest loss there are kept, the first ones included.

    Attributes:
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
        device: what trains, ``cpu`` or ``cuda``, an NVIDIA GPU; each gives its own bits, the same in every run.
        adapter_rank: train, for each linear, two matrices of this rank, whose product is added to its weight at the end
            (LoRA); 0 trains the weight itself.
    """

    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-4
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
    device: DeviceName = "cpu"
    adapter_rank: int = 0

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model that predicts no next tokens."""
        info: ModelInfo = graph.meta["model"]
        if not info.generates:
            raise UsageError(f"finetune: {info.name} predicts no next tokens; use distill, which has a teacher")
        super().requires(graph, ctx)

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the loss of its next tokens."""

        def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
            return next_token_loss(outputs.last, batch)

        return TrainableGraph(graph, names, device=device), objective
