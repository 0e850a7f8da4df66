"""Permute channels, so that a later pass loses less (Pool and Yu 2021, Channel Permutations for N:M Sparsity).

    gate [inner, hidden], up [inner, hidden]  ->  act  ->  down [hidden, inner]
    the same function, and other neighbours, with rows of gate and up and columns of down in another order

Which channels are free is read from the dataflow (:mod:`compressor.graph.dependencies.permuting`).  The weights are
rewritten where they lie: nothing is added to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.numerics.sparsity.block_sparsity import Importance
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_untouched
from compressor.pipeline.structured.orders import FreeLinears, Orders
from compressor.pipeline.structured.permutations import Permutation


@dataclass(frozen=True)
class PermuteChannels(Pass):
    """Put channels in an order in which the pass behind this one loses less; the model's function stays.

    Free are the inner channels of feed-forward networks, the residual stream as a whole, the values of each head of
    keys and values, and channels of convolutions.  Heads and the channels of queries and keys keep their places.
    Outputs are compared on samples, or on random inputs where the recipe has none: the run ends if they differ by more
    than 1e-4 of their size.

    Attributes:
        scheme: format that the pass behind this one packs: N of M weights are chosen among better neighbours
            (``W8A16_2:4``), rows that keep the same columns share blocks (``W8A16_B16x1@50``), columns of like size
            share scales (``W4A16_G32``).
        importance: ``activation`` counts a weight by its contribution to the outputs, ``|w| ** 2 * ||x|| ** 2``;
            ``magnitude`` by its size alone, and needs no calibration samples.
        rounds: exchanges of each cluster of channels with others that are tried at most, of each set.
        targets: class names, module names or ``re:`` patterns of the linears that the order is good for.
        ignore: patterns of linears that do not count; their channels follow those of others.
    """

    scheme: str
    importance: Importance = "activation"
    rounds: int = 256
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= 1_000_000:
            raise UsageError(f"permute_channels: rounds {self.rounds} is not between 1 and 1,000,000")
        self._orders  # noqa: B018 (refuses a format that no order helps)

    @property
    def _orders(self) -> Orders:
        return Orders(Format.parse(self.scheme))

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model without such channels."""
        self._find(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Permute all sets of channels; the first linear of each has a record of what it gained."""
        steps = Permutation(self._orders, self.rounds, self.importance == "activation", self)
        steps.run(graph, ctx, self._find(graph))
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> Sequence[SitePlan]:
        """Plan each linear on a graph without weights: all stay as large as they are."""
        found, plans = self._find(graph), {plan.site: plan for plan in plan_untouched(graph)}
        needs = CalibrationNeeds(False, False, hessian=False) if self.importance == "activation" else None
        for one in found:
            for site in one.sites:
                plans[site.name] = replace(plans[site.name], note="channels change places", needs=needs)
            first, (moved, held) = plans[one.sites[0].name], self._orders.search_bytes(one, self.rounds)
            work = {"stream_byte": first.work.get("stream_byte", 0) + moved}
            plans[first.site] = replace(first, work=work, working_bytes=max(first.working_bytes, held))
        return [*plans.values()]

    def _find(self, graph: GraphModule) -> list[FreeLinears]:
        return self._orders.find(graph, self.targets, self.ignore)
