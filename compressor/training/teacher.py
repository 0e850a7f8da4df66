"""The dense model as a teacher: the distance of a graph's outputs to its own, and passes that train towards it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.calibration.calibrate import CalibrationRun
from compressor.calibration.statistics import MeanSquares
from compressor.errors import CompressorError, UsageError
from compressor.graph.model import ModelInfo
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site
from compressor.pipeline.context import Context
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.losses import divergence, hidden_error
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.training_pass import TrainingPass

_MEASURED = 32  # samples on which inputs are measured


def with_teacher(
    pass_name: str,
    graph: GraphModule,
    ctx: Context,
    names: Sequence[str],
    temperature: float,
    hidden: float,
    device: Device | None = None,
) -> tuple[TrainableGraph, Objective]:
    """Return a graph to train, and the distance of its outputs to those of the dense graph.

    The teacher runs anew on each batch: its logits for all samples would take more memory than the models.

    Args:
        names: parameters to train.
        temperature, hidden: options of the pass `distill`.
        device: where both run; None is the CPU.
    Raises:
        CompressorError: there is no dense graph.
        UsageError: hidden states are wanted, and some have no counterpart (:func:`partners`).
    """
    if ctx.dense is None:
        raise CompressorError(f"{pass_name}: runs in a pipeline, which keeps the dense graph for it")
    points, teacher_points = [], []
    if hidden:
        own, theirs = segments(graph), segments(ctx.dense)
        instead = "set `hidden: 0`, which compares the predictions alone"
        for segment, number in zip(own[:-1], partners(pass_name, own, theirs, instead), strict=False):
            points.append(_exit(segment))
            teacher_points.append(_exit(theirs[number]))
    student = TrainableGraph(graph, names, points, device)
    return student, towards(student.info, TrainableGraph(ctx.dense, (), teacher_points, device), temperature, hidden)


def towards(info: ModelInfo, teacher: TrainableGraph, temperature: float, hidden: float) -> Objective:
    """Return the distance of a graph's outputs to a teacher's, which runs anew on each batch.

    Args:
        info: of the graph that is trained, whose points are those of the teacher, in their order.
        temperature: logits are divided by it.
        hidden: weight of the points' error in the loss; 0 leaves them out.
    """

    def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch)
        loss = output_error(info, outputs.last, wanted.last, temperature)
        return loss + hidden * hidden_error(outputs.hidden, wanted.hidden) if hidden else loss

    return objective


def output_error(info: ModelInfo, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the divergence of predictions, or the error of an encoder's hidden states.

    Args:
        student, teacher: what two graphs of the same model put out.
    """
    if info.generates or (info.kind == "module" and student.dim() == 2):
        return divergence(student, teacher, temperature)
    return hidden_error([student], [teacher])


def partners(pass_name: str, own: Sequence[Segment], theirs: Sequence[Segment], instead: str) -> list[int]:
    """Return, for each segment of a compressed graph, the number of the dense one's segment that holds its linears.

    Linears keep their names where others are removed, so that those tell which segment is left where the dense graph
    has more.  A segment some of whose linears are gone has the same counterpart as a whole one.  The last segments,
    which end in the output, belong together whatever they hold.

    Args:
        own: of the graph that is trained, in order.
        theirs: of the dense graph, in order.
        instead: advice, for messages.
    Raises:
        UsageError: a segment's linears are all new, are in several segments or in one that another segment has, come
            in another order, or are calls of one module some of whose calls are gone; or streams differ in width.
    """
    called = [Counter(name.partition("@")[0] for cut in cuts for name in _names(cut)) for cuts in (own, theirs)]
    for name, count in called[0].items():
        if called[1][name] not in (0, count):
            raise UsageError(
                f"{pass_name}: {name} is called {called[1][name]} times in the dense model and {count} in the "
                f"compressed one, and no name tells which calls are left; {instead}"
            )
    places = {name: number for number, cut in enumerate(theirs) for name in _names(cut)}
    found: list[int] = []
    for segment in own[:-1]:
        first, *_ = names = _names(segment)
        numbers = {places[name] for name in names if name in places}
        if not numbers:
            raise UsageError(
                f"{pass_name}: {first} is not in the dense model, so that no state of it is what the block with "
                f"{first} has to put out; {instead}"
            )
        number = min(numbers)
        if len(numbers) > 1 or number == len(theirs) - 1 or (found and number <= found[-1]):
            raise UsageError(
                f"{pass_name}: around {first}, the residual stream of the compressed graph is live in other places "
                f"than the dense one's; {instead}"
            )
        if (width := _width(segment)) != (dense := _width(theirs[number])):
            raise UsageError(
                f"{pass_name}: behind {first}, the residual stream of the compressed graph is {width} wide, and the "
                f"dense one's {dense}; {instead}"
            )
        found.append(number)
    return [*found, len(theirs) - 1]


def _names(segment: Segment) -> list[str]:
    return [site.name for site in (*segment.sites, *segment.packed)]


def _exit(segment: Segment) -> Node:
    assert segment.exit is not None  # it is not the last
    return segment.exit


def _width(segment: Segment) -> int:
    """Return the width of the stream behind a segment; the other sizes are symbols of each graph's own."""
    return int(_exit(segment).meta["val"].shape[-1])


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

    def input_squares(self, graph: GraphModule, ctx: Context, sites: Sequence[Site]) -> dict[str, Tensor]:
        """Return the mean squares of the channels of each weight's inputs, float [in], on the first samples."""
        ids, found = ctx.calibration(self.name).ids, dict[str, Tensor]()
        for group, squares in CalibrationRun(graph, ids[:_MEASURED], sites, MeanSquares).groups():
            found |= {site.weight_name: squares.value for site in group}
        return found

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance of its outputs to the dense model's."""
        return with_teacher(self.name, graph, ctx, names, self.temperature, self.hidden, device)
