"""Let tokens run fewer blocks the further they stand in a text, by one schedule for the whole batch.

    position     0 ... 63    64 ... 127    128 ...
    blocks       0 1 2 3 4   0 . 2 3 4     0 . . 3 4

SkipDecode (Del Corro et al. 2023, arXiv 2307.02628): later tokens are easier, entries of a batch share the budget of a
position, and since it never rises, a token that runs a block finds keys and values of all earlier ones there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.exits.gates import gated_blocks
from compressor.graph.model import clone_graph
from compressor.numerics.depth.schedules import why_wrong
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.training.device import Device
from compressor.training.exits.depths import check_depths, find_depths, set_depths
from compressor.training.loop import Objective
from compressor.training.settings import WeightOptions
from compressor.training.teacher import towards
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import TrainingPass


@dataclass(frozen=True, kw_only=True)
class SkipDecode(WeightOptions, TrainingPass, Pass):
    """Give tokens a budget of blocks that falls with their position: a schedule, or the best of a stated cost.

    A budget of n takes the first blocks, which always run, and the last; those behind the first are left out.  Prompts
    follow the same schedule, so that they and steps compute one function; steps save what they leave out.  Training
    draws the model under its schedule towards what it was before; put passes that pack weights behind it.

    Attributes:
        depths: pairs of a position and of how many blocks tokens run from there on, which fall; in place of ``cost``.
        cost: mean share of the blocks that the positions of a calibration sample run: depths that fall along a line are
            tried on the samples, and those with the smallest loss are taken.
        first: blocks at the beginning that all tokens run.
        tried: samples that depths are tried on.
        steps: of the optimiser; 0 trains nothing.
    """

    depths: tuple[tuple[int, int], ...] | None = None
    cost: float | None = None
    first: int = 1
    tried: int = 16
    steps: int = 0
    evaluate_every: int = 50

    may_train_nothing: ClassVar[bool] = True
    teaches_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.depths is None) == (self.cost is None):
            raise UsageError("skip_decode: give `depths`, or `cost`, a share of the blocks, and not both")
        if self.depths is not None and (reason := why_wrong(self.depths)):
            raise UsageError(f"skip_decode: depths: {reason}")
        if self.cost is not None and not 0 < self.cost < 1:
            raise UsageError(f"skip_decode: cost {self.cost:g} is not a share of the blocks between 0 and 1")
        if self.first < 0 or self.tried < 1:
            raise UsageError("skip_decode: first is not below 0, and tried not below 1")
        super().__post_init__()

    @property
    def runs_samples(self) -> bool:
        """True where depths are tried."""
        return self.cost is not None

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models whose blocks cannot be left out, depths that they have not, and what training refuses."""
        check_depths(graph, self.name, self.depths, self.first)
        if self.steps:
            super().requires(graph, ctx)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained, and gate the blocks: by the last depths, where they are to be found."""
        plans, blocks = super().plan(graph, ctx), len(gated_blocks(graph))
        set_depths(graph, self.depths or ((0, blocks), (1, max(1, self.first))), self.first)
        return plans

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Choose the depths, train towards what the model was, and gate the blocks."""
        depths, fixed = self.depths, self
        if depths is None:
            depths = find_depths(graph, ctx, self.name, self.cost or 0.0, self.first, self.tried)
            fixed = replace(self, depths=depths, cost=None)
        if self.steps:
            TrainingPass.run(fixed, graph, ctx)
        set_depths(graph, depths, self.first)
        return graph

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with its gates, and the distance of its outputs to those without."""
        gated, before = clone_graph(graph), TrainableGraph(clone_graph(graph), (), (), device)
        set_depths(gated, self.depths or (), self.first)
        model = TrainableGraph(gated, names, (), device)
        return model, towards(model.info, before, 1.0, 0.0)
