"""Train a model while more and more of its weights become zero: 80 to 95% in blocks, where pruning at once fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.graph.sites import Site
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_zeros
from compressor.training.settings import TeacherOptions, WeightOptions
from compressor.training.teacher import TaughtPass
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.admm import ProjectedBlocks
from compressor.training.zeros.masks import GrowingBlocks, Masks


@dataclass(frozen=True, kw_only=True)
class SparseTrain(TeacherOptions, WeightOptions, TaughtPass, Pass):
    """Leave out blocks of columns little by little, while the rest learns to predict what the model did.

    The share that is left out rises by a cubic schedule during two thirds of the steps, or weights are drawn towards
    zeros by ADMM; the last third keeps these zeros.  The teacher is the model before the first pass.  The
    weights stay dense, with zeros: put one of `magnitude`, `wanda` and `sparsegpt` behind it with the same ``scheme``,
    which packs what is left.  A share of the samples is held out; the weights with the smallest loss there, once all
    zeros are in place, are kept.

    Attributes:
        scheme: format name that ends with what is left out: ``W8A16_B16x1@90``, or ``W8A8_B32x64@90``.
        method: ``cubic`` leaves out more and more; ``admm`` draws weights towards the nearest that have as many zeros,
            ever more strongly, and sets them to zero after two thirds of the steps.
        penalty: of ``admm`` in the end: at 1, a weight as large as its matrix's mean is drawn as fast as the optimiser
            may move it.
        project_every: steps of ``admm`` between two choices of blocks.
    """

    scheme: str
    method: Literal["cubic", "admm"] = "cubic"
    penalty: float = 10.0
    project_every: int = 8
    steps: int = 600

    def __post_init__(self) -> None:
        if Format.parse(self.scheme).extra(ColumnBlocks) is None:
            raise UsageError(f"sparse_train: scheme {self.scheme} leaves no blocks out; end it with _B16x1@90 or so")
        if self.method not in ("cubic", "admm"):
            raise UsageError(f"sparse_train: method {self.method} is none of cubic, admm")
        if not 0 < self.penalty <= 1000:
            raise UsageError(f"sparse_train: penalty {self.penalty:g} is not above 0 and at most 1000")
        if not 1 <= self.project_every <= 10**9:
            raise UsageError(f"sparse_train: project_every {self.project_every} is not a whole number from 1")
        super().__post_init__()

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained and will have zeros."""
        plan_zeros(graph, {site.name: Format.parse(self.scheme) for site in self.chosen(graph)[0]})
        return super().plan(graph, ctx)

    @property
    def more_copies(self) -> int:
        """Return the two of ADMM: the projection and the dual variable."""
        return 2 if self.method == "admm" else 0

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Return blocks that grow or towards which weights are drawn, chosen by the size of the inputs now."""
        fmt, moments = Format.parse(self.scheme), self.input_squares(graph, ctx, sites)
        blocks = fmt.extra(ColumnBlocks)
        assert blocks is not None
        kept = {site.weight_name: fmt.stored_columns(site.in_features) for site in sites}
        if self.method == "cubic":
            return GrowingBlocks(model.weights, kept, moments, self.steps, blocks)
        rate = self._settings().rate
        return ProjectedBlocks(model.weights, kept, moments, self.steps, rate, self.penalty, self.project_every, blocks)
