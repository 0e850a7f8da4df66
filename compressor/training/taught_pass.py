"""Share the teacher among passes that train towards the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.pipeline.context import Context
from compressor.training.loop import Objective
from compressor.training.teacher import with_teacher
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import TrainingPass


class TaughtPass(TrainingPass):
    """Train towards the outputs of the model before the first pass.  The options are those of each pass.

    Attributes:
        temperature: logits are divided by it.
        hidden: weight of the hidden states' error in the loss.
    """

    needs_dense: ClassVar[bool] = True
    temperature: float
    hidden: float

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 100:
            raise UsageError(f"{self.name}: temperature {self.temperature:g} is not above 0 and at most 100")
        if not 0 <= self.hidden <= 1e6:
            raise UsageError(f"{self.name}: hidden {self.hidden:g} is not a weight from 0 to a million")
        super().__post_init__()

    def prepare(self, graph: GraphModule, ctx: Context, names: Sequence[str]) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance of its outputs to the dense model's."""
        return with_teacher(self.name, graph, ctx, names, self.temperature, self.hidden)
