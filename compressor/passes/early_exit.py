"""Let tokens leave a decoder early, where an exit behind some of its blocks is sure of what the whole model would say.

    stream -> block 0 ... block 2 -> norm -> head -> sure?  yes: the token
                               '-> block 3 -> block 4 -> norm -> head -> the token      no

Exits use the model's own final norm and head.  LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains them; CALM
(Schuster et al. 2022, arXiv 2207.07061) asks for their confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.training.device import Device
from compressor.training.exits.calibrate import Action, Wanted, set_exits, state_exits
from compressor.training.exits.layer_skip import Curriculum
from compressor.training.exits.measure import chosen_exits, measure_exits
from compressor.training.exits.objective import ExitPlan, exit_training
from compressor.training.loop import Objective
from compressor.training.settings import WeightOptions, split
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import TrainingPass


@dataclass(frozen=True, kw_only=True)
class EarlyExit(WeightOptions, TrainingPass, Pass):
    """Train exits, and calibrate from which confidence on they speak.

    Each exit learns to predict what the whole model does, and the whole model what it did before.  A share of the
    samples is held out: the weights with the smallest loss there are kept, the first ones included, and half of them
    decides the thresholds, which the other half checks.  Passes behind it move confidences: put it there once more,
    with ``steps: 0``, which calibrates alone.

    Attributes:
        exits: how many, evenly spaced, or a list of the numbers of blocks that run in front of each.
        agreement: share of all tokens that must be those of the whole model, which decides the thresholds.
        action: what confidence decides: ``exit`` takes a token where it is high, ``stop`` gives a text up where it
            stays low, ``both`` does both.  ``draft`` lets no token leave: the exit is trained for drafts that the
            whole model verifies, those of ``speculate: exit``.
        hopeless: a text is given up at a confidence at which at most this share of the whole model's tokens was right.
        window: tokens whose mean confidence is asked for that.
        dropout: largest probability with which a sample leaves a block out in training, that of the last block.
        exit_scale: weight of the exits in the loss; each counts by the square of its depth.
        curriculum: which exits learn in a step: ``all``, one in turn (``rotational``), or first the last (``gradual``).
        steps: of the optimiser; 0 trains nothing.
    """

    exits: int | tuple[int, ...] = 1
    agreement: float = 0.95
    action: Action = "exit"
    hopeless: float = 0.1
    window: int = 8
    dropout: float = 0.1
    exit_scale: float = 1.0
    curriculum: Curriculum = "all"
    steps: int = 300
    evaluate_every: int = 50

    may_train_nothing: ClassVar[bool] = True
    teaches_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._wanted()
        self._plan(self.exits if isinstance(self.exits, tuple) else (self.exits,))
        super().__post_init__()

    @property
    def runs_samples(self) -> bool:
        """True: exits are measured."""
        return True

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models whose tokens cannot leave early, exits that are not inside, and what training refuses."""
        exits = self._exits(graph)
        if self.action == "draft":
            self._require_drafts(graph, exits)
        if self.steps:
            super().requires(graph, ctx)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained, and that tokens leave; only the run can tell at which confidence."""
        plans = super().plan(graph, ctx)
        if self.action != "draft":
            state_exits(graph, self._exits(graph))
        return plans

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Train the exits, and calibrate them on what is held out."""
        ids, exits = ctx.calibration(self.name).ids, self._exits(graph)
        assert isinstance(ids, Tensor)  # the samples of decoders are
        held_out, _ = split(ids, self.held_out, ctx.seed)
        before = measure_exits(graph, exits, held_out)
        graph = super().run(graph, ctx) if self.steps else graph
        set_exits(graph, ctx, exits, before, held_out, self._wanted())
        return graph

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with its exits, and their loss."""
        return exit_training(graph, names, self._plan(self._exits(graph)), ctx.seed, device)

    def _require_drafts(self, graph: GraphModule, exits: tuple[int, ...]) -> None:
        """Refuse to train for drafts that the recipe does not ask for, or that leave elsewhere."""
        info: ModelInfo = graph.meta["model"]
        if not info.first_blocks:
            raise UsageError(f"{self.name}: action draft trains for `speculate: exit`; add that to the recipe")
        if exits != (info.first_blocks,):
            raise UsageError(
                f"{self.name}: exits behind {', '.join(map(str, exits))} blocks, and drafts leave behind "
                f"{info.first_blocks}: give exits: [{info.first_blocks}], or another `layer` of `speculate`"
            )

    def _wanted(self) -> Wanted:
        return Wanted(self.agreement, self.action, self.hopeless, self.window)

    def _plan(self, exits: tuple[int, ...]) -> ExitPlan:
        return ExitPlan(exits, self.dropout, self.exit_scale, self.curriculum, self.steps)

    def _exits(self, graph: GraphModule) -> tuple[int, ...]:
        return chosen_exits(graph, self.exits, self.name)
