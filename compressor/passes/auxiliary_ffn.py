"""Let each token take a feed-forward network, a small one beside it, or neither, as a router chooses.

Duo-LLM (Alizadeh et al. 2024, arXiv 2410.10846) trains small networks beside those of a model, and routers that spend a
budget of operations where tokens need it.  The graph is drawn in :mod:`compressor.graph.exits.auxiliary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.exits.auxiliary import CannotRoute, add_auxiliary, auxiliary_names, mixed_graph, routed_networks
from compressor.graph.rewrite import set_parameter
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.auxiliary import Measure, auxiliary_loss, begin_auxiliary
from compressor.training.settings import split
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import AddingPass

_PRICED = 8  # samples on which the cost is met


@dataclass(frozen=True, kw_only=True)
class AuxiliaryFfn(AddingPass, Pass):
    """Give feed-forward networks small ones beside them, and routers; the networks themselves stay as they are.

    Tokens take the network, the small one or neither, in each block and in every prompt and step alike, so that on the
    samples they take ``cost`` of the networks' multiply-adds at most.  Routers and small networks learn the model's own
    predictions.  The networks are then experts (class ``Expert``); passes that pack weights come behind.

    Attributes:
        cost: mean share of the networks' multiply-adds that a token takes, routers included.
        width: of the small networks.
        blocks: numbers of the blocks; None for all.
        pull: weight, in the loss, of the squared difference to the cost.
        mimic: weight of the small networks' relative error in what the networks themselves make.
    """

    cost: float = 0.6
    width: int = 64
    blocks: tuple[int, ...] | None = None
    pull: float = 10.0
    mimic: float = 0.3
    steps: int = 300
    batch: int = 4
    learning_rate: float = 2e-3
    evaluate_every: int = 50

    adds: ClassVar[str] = "added: it routes tokens, or is the small network that some take"
    teaches_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.cost < 1:
            raise UsageError(f"auxiliary_ffn: cost {self.cost:g} is not a share between 0 and 1")
        if not 1 <= self.width <= 10**6 or self.blocks == ():
            raise UsageError("auxiliary_ffn: width is a whole number from 1, and blocks, if given, name one at least")
        if not (0 <= self.pull <= 1e6 and 0 <= self.mimic <= 1e6):
            raise UsageError("auxiliary_ffn: pull and mimic are weights from 0 to a million")
        super().__post_init__()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Add routers and small networks, train them, meet the cost, and say what tokens take and lose."""
        ids = ctx.calibration(self.name).ids
        assert isinstance(ids, Tensor)  # a decoder's are
        self.add(graph)
        begin_auxiliary(graph, [network.name for network in routed_networks(graph)], ctx.seed)
        graph = super().run(graph, ctx)
        held_out, trained = split(ids, self.held_out, ctx.seed)
        measure = Measure(graph, self.batch)
        for name, bias in measure.biases(measure.price(trained[:_PRICED], self.cost)).items():
            set_parameter(graph, name, bias)
        ctx.notes.append(self._figures(graph, held_out))
        return graph

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with both networks for every token, and its distance to the model as it was."""
        mixed, points = mixed_graph(graph)
        model = TrainableGraph(mixed, names, points, device)
        return model, auxiliary_loss(graph, self.cost, self.pull, self.mimic, device)

    def added(self, graph: GraphModule) -> list[str]:
        """Return the names of all parameters of routers and small networks."""
        return [name for network in routed_networks(graph) for name in auxiliary_names(network.name)]

    def add(self, graph: GraphModule) -> list[str]:
        """Add routers and small networks; return the names of their parameters."""
        try:
            names = add_auxiliary(graph, self.blocks, self.width)
        except CannotRoute as error:
            raise UsageError(f"auxiliary_ffn: {error}") from error
        networks = routed_networks(graph)
        least = sum(one.operations[0] for one in networks) / sum(one.operations[1] for one in networks)
        if self.cost <= least:
            raise UsageError(f"auxiliary_ffn: cost {self.cost:g}: routers alone take {least:.3g}; raise it")
        return [name for network in names for name in auxiliary_names(network)]

    def _figures(self, graph: GraphModule, held_out: Tensor) -> str:
        networks, measure = routed_networks(graph), Measure(graph, self.batch)
        taken, whole = measure.taken(held_out), sum(network.operations[1] for network in networks)
        big, small, neither = taken.shares
        return (
            f"auxiliary_ffn: of held-out tokens {big:.1%} take the network, {small:.1%} the small one and "
            f"{neither:.1%} neither: {taken.share * whole / 1e6:.4g} million multiply-adds a token in {len(networks)} "
            f"networks in place of {whole / 1e6:.4g} ({taken.share:.1%}); perplexity {math.exp(taken.loss):.4g} in "
            f"place of {math.exp(measure.whole_loss(held_out)):.4g}"
        )
