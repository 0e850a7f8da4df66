"""Learn in one training which weights to keep, by gates that are driven to a decision (arXiv 2302.10798)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.sites import Site
from compressor.numerics.sparsity.n_of_m import Pattern, pattern_of
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_zeros
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.settings import TeacherOptions, WeightOptions
from compressor.training.teacher import TaughtPass
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.gates import Gates, first_scores
from compressor.training.zeros.masks import Masks
from compressor.training.zeros.start import refuse_unfit

_COPIES = 8  # of a score: itself, its gradient, two means, a step's work, its slope, its order, which is twice as wide


@dataclass(frozen=True, kw_only=True)
class PolarisedGates(TeacherOptions, WeightOptions, TaughtPass, Pass):
    """Train a gate for each weight, open or closed, with the weights, so that the outputs come near to the dense model.

    As many gates are open at any time as the scheme keeps: those with the largest scores, at first those of the largest
    ``|w| * ||x||`` of each row (Wanda).  Scores are trained, and a regulariser drives them away from the middle, so
    that gates are decided when training ends.  It ends with the start where nothing has a smaller held-out loss.  The
    weights stay dense, with zeros: put one of `magnitude`, `wanda` and `sparsegpt` behind it with the same ``scheme``,
    which packs what is left.

    Attributes:
        scheme: format name that ends with the single weights that are left out: ``W8A16_B1x1@50`` keeps half of the
            weights of each linear, ``W8A16_2:4`` two of every four of a row.
        train_weights: train the weights too; their gates change in the first two thirds of the steps.  Without it they
            stay what they are, and gates change until the end.
        polarisation: how strongly scores are driven apart in the end: at 1, as fast as the optimiser may move them.
        gate_speed: scores move so many times as fast as weights.
    """

    scheme: str
    train_weights: bool = True
    polarisation: float = 1.0
    gate_speed: float = 100.0
    vectors: bool = False

    def __post_init__(self) -> None:
        if pattern_of(Format.parse(self.scheme)) is None:
            raise UsageError(
                f"polarised_gates: scheme {self.scheme} leaves no single weights out; end it with _B1x1@50, _2:4 or so"
            )
        if not 0 <= self.polarisation <= 1000:
            raise UsageError(f"polarised_gates: polarisation {self.polarisation:g} is not from 0 to 1000")
        if not 0 < self.gate_speed <= 1e6:
            raise UsageError(f"polarised_gates: gate_speed {self.gate_speed:g} is not above 0 and at most a million")
        super().__post_init__()

    @property
    def more_copies(self) -> int:
        """Return those of the scores."""
        return _COPIES

    @property
    def _pattern(self) -> Pattern:
        found = pattern_of(Format.parse(self.scheme))
        assert found is not None
        return found

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse linears that will have zeros, and rows that are not whole groups, too."""
        super().requires(graph, ctx)
        refuse_unfit(self.name, graph, self.chosen(graph)[0], self.scheme)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained, and that they will have zeros."""
        plan_zeros(graph, {site.name: Format.parse(self.scheme) for site in self.chosen(graph)[0]})
        return super().plan(graph, ctx)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Train, from Wanda's choice on; weights that came with zeros are refused."""
        refuse_unfit(self.name, graph, self.chosen(graph)[0], self.scheme)
        return super().run(graph, ctx)

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with gates at the linears' weights, and the distance to the dense model."""
        model, objective = super().prepare(graph, ctx, names, device)
        sites, first = self.chosen(graph)[0], {}
        squares = self.input_squares(graph, ctx, sites)
        for site in sites:
            weight = graph.get_parameter(site.weight_name).detach().float()
            first[site.weight_name] = first_scores(weight, squares[site.weight_name], self._pattern)
        rate, options = self._settings().rate, (self.polarisation, self.gate_speed, self.train_weights)
        model.stand_in(list(first), lambda own: Gates(own, first, self._pattern, self.steps, rate, *options))
        return model, objective

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Return the gates."""
        assert isinstance(model.stand_ins, Gates)
        return model.stand_ins
