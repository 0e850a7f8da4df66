"""Replace activation functions by ReLU, and train until most neurons are zero (ProSparse, arXiv 2402.13516)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.products.deterministic import total
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.settings import TeacherOptions, WeightOptions, staged
from compressor.training.teacher import TaughtPass
from compressor.training.trainable import Outputs, TrainableGraph
from compressor.training.zeros.masks import LastThird, Masks

_ATEN = torch.ops.aten
_RELU, _SMOOTH = _ATEN.relu.default, (_ATEN.silu.default, _ATEN.gelu.default)
_MEASURED = 8  # samples on which zeros are counted


@dataclass(frozen=True, kw_only=True)
class ReluSparse(TeacherOptions, WeightOptions, TaughtPass, Pass):
    """Replace SiLU and GELU in front of linears by ReLU, and train towards the dense model until most neurons are zero.

    A penalty on what ReLU lets through rises along three half waves of a sine during two thirds of the steps, and stays
    in the last third, whose states alone count.  Behind passes that quantise, `activation_sparse` on the linears that
    read these neurons skips those that are zero: exactly, up to the share that it is asked for.  The teacher is the
    model before the first pass.

    Attributes:
        penalty: weight in the loss of the mean of what ReLU lets through.
    """

    penalty: float = 0.1
    steps: int = 600

    def __post_init__(self) -> None:
        if not 0 <= self.penalty <= 1e6:
            raise UsageError(f"relu_sparse: penalty {self.penalty:g} is not a weight from 0 to a million")
        super().__post_init__()

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model without such functions."""
        if not _activations(graph):
            raise UsageError("relu_sparse: no dense linear reads a SiLU, GELU or ReLU, alone or times a factor")
        super().requires(graph, ctx)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace the functions, train, and say how many neurons are zero."""
        _replace(graph)
        before = _zeros(graph, ctx)
        graph = super().run(graph, ctx)
        after = _zeros(graph, ctx)
        ctx.notes.append(f"relu_sparse: {after:.1%} of neurons are zero, {before:.1%} before training, on some samples")
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Replace the functions, which has no cost, and plan the training."""
        _replace(graph)
        return super().plan(graph, ctx)

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance to the dense model plus the penalty."""
        model, distance = super().prepare(graph, ctx, names, device)
        count = len(model.points)
        model.points += _activations(graph)

        def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
            passed = [total(x) / x.numel() for x in outputs.hidden[count:]]
            loss = distance(batch, Outputs(outputs.last, outputs.hidden[:count]), step)
            return loss + self.penalty * staged(step, self.steps) * torch.stack(passed).mean()

        return model, objective

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Return the zeros of the linears, which stay."""
        return LastThird(model.weights, {site.weight_name for site in sites}, self.steps)


def _activations(graph: GraphModule) -> list[Node]:
    """Return the activation functions that dense linears read, alone or times a factor, in order."""
    found: dict[Node, None] = {}
    for site in linear_sites(graph):
        read: Any = site.input.args if site.input.target is _ATEN.mul.Tensor else (site.input,)
        found |= {node: None for node in read if isinstance(node, Node) and node.target in (_RELU, *_SMOOTH)}
    return list(found)


def _replace(graph: GraphModule) -> None:
    """Make all of them ReLU."""
    for node in _activations(graph):
        node.target, node.args, node.kwargs = _RELU, node.args[:1], {}
    graph.recompile()


@torch.no_grad()
def _zeros(graph: GraphModule, ctx: Context) -> float:
    """Return the share of neurons that are zero on some samples."""
    ids: Any = ctx.calibration("relu_sparse").ids
    passed = TrainableGraph(graph, points=_activations(graph))(ids[:_MEASURED]).hidden
    return sum(float((x == 0).double().mean()) for x in passed) / len(passed)
