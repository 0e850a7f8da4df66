"""Learn which N of every M weights to keep, by what the model predicts (MaskLLM, arXiv 2409.17481)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.graph.sites import Site
from compressor.numerics.sparsity.n_of_m import largest_of_groups
from compressor.passes.alps import Alps
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_zeros
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.settings import TeacherOptions, WeightOptions
from compressor.training.teacher import TaughtPass
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.choices import Choices, Refitted
from compressor.training.zeros.masks import Masks
from compressor.training.zeros.start import plans_with_start, pruned_start, refuse_unfit

_COPIES = 7  # of a logit, as of a weight that is trained: itself, its gradient, two means, a step's work, draw, noise


@dataclass(frozen=True, kw_only=True)
class LearnedMask(TeacherOptions, WeightOptions, TaughtPass, Pass):
    """Train the choice of N of every M weights of a row, so that the outputs come near to those of the dense model.

    Each group of M weights has a logit for each mask that the pattern allows; a draw of masks is trained, which gets
    ever more certain, and the likeliest masks are kept: those of the start where none has a smaller held-out loss.  Of
    2:4 it trains one and a half numbers for each weight.  Weights stay dense, with zeros: put one of `magnitude`,
    `wanda` and `sparsegpt` behind it with the same ``scheme``, which packs what is left.

    Attributes:
        scheme: format name that ends with N:M: ``W8A16_2:4`` keeps two of every four weights of a row.
        refit: begin with the masks of `alps` and the weights that it refits, on the samples that are trained on; a
            weight that comes back is the dense one.  Without it, begin with Wanda's masks (the largest
            ``|w| * ||x||``), and weights stay what they are; a learning rate of 0.3 suits that.
    """

    scheme: str
    refit: bool = True
    learning_rate: float = 0.15
    vectors: bool = False

    def __post_init__(self) -> None:
        if Format.parse(self.scheme).extra(KeptOfGroup) is None:
            raise UsageError(f"learned_mask: scheme {self.scheme} does not keep N of every M; end it with _2:4 or so")
        super().__post_init__()

    @property
    def more_copies(self) -> int:
        """Return those of the logits, and that of the start."""
        return math.ceil(_COPIES * self._pattern.choices / self._pattern.size) + self.refit

    @property
    def _pattern(self) -> KeptOfGroup:
        found = Format.parse(self.scheme).extra(KeptOfGroup)
        assert found is not None
        return found

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse linears that will have zeros, and rows that are not whole groups, too."""
        super().requires(graph, ctx)
        refuse_unfit(self.name, graph, self.chosen(graph)[0], self.scheme)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained and will have zeros, and add what the start takes."""
        sites = self.chosen(graph)[0]
        before = self._start(sites).plan(clone_graph(graph), ctx) if self.refit else []
        plan_zeros(graph, {site.name: Format.parse(self.scheme) for site in sites})
        return plans_with_start(before, super().plan(graph, ctx))

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Train from what ALPS makes of the weights, or from Wanda's masks."""
        refuse_unfit(self.name, graph, sites := self.chosen(graph)[0], self.scheme)
        if not self.refit:
            return super().run(graph, ctx)
        with pruned_start(self.name, graph, ctx, sites, self._start(sites), self.held_out) as start:
            return self.run_prepared(graph, ctx, partial(self.prepare, start=start))

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device, start: Refitted = None
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with logits in the place of weights, and the distance to the dense model."""
        model, objective = super().prepare(graph, ctx, names, device)
        sizes = {name: (value != 0).float() for name, value in (start or {}).items()}
        for name, squares in self.input_squares(graph, ctx, self.chosen(graph)[0]).items() if start is None else ():
            sizes[name] = graph.get_parameter(name).detach().float().square() * squares
        kept = {name: largest_of_groups(size, self._pattern) for name, size in sizes.items()}
        model.stand_in(list(kept), lambda frozen: Choices(frozen, kept, self._pattern, self.steps, ctx.seed, start))
        return model, objective

    def _start(self, sites: Sequence[Site]) -> Alps:
        return Alps(self.scheme, targets=tuple(site.name for site in sites), pack=False)

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Return the choices."""
        assert isinstance(model.stand_ins, Choices)
        return model.stand_ins
