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
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.losses import next_token_loss
from compressor.training.settings import AdapterOptions, WeightOptions
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.training_pass import TrainingPass


@dataclass(frozen=True, kw_only=True)
class Finetune(WeightOptions, AdapterOptions, TrainingPass, Pass):
    """Train weights to predict the next tokens of the calibration samples; `distill` learns more from as many.

    Linears that are dense yet are trained in float32 by AdamW, and stored in the type that they had.  What is zero in
    them stays zero, so that pruning passes go in front, with ``pack: false``, and passes that pack behind.  A share of
    the samples is held out; the weights with the smallest loss there are kept, the first ones included.

    """

    learning_rate: float = 1e-4
    warmup: float = 0.1

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
