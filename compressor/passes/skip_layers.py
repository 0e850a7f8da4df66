"""Remove whole transformer blocks, or their attention or feed-forward networks, that change least what passes through.

    stream -> block 2 -> block 3 -> block 4          becomes        stream -> block 2 -> block 4

What is left computes on the same tensors: caches and parameters of what has gone disappear, positions and masks stay.
Blocks are read from the dataflow (:mod:`compressor.graph.blocks`).  Perplexity shows little of what texts lose that the
model writes: measure `continuations` too, and let `distill` follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.kinds.carried import KEPT
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.structured.layer_ranking import Layer, Ranking
from compressor.pipeline.structured.layers import (
    Part,
    are_alike,
    count_removed,
    find_layers,
    layer_bytes,
    layers_to_remove,
    named_layers,
    plan_layers,
    remove_layers,
)

_NAME = "skip_layers"


@dataclass(frozen=True)
class SkipLayers(Pass):
    """Remove layers: those named, or so many of those that the model needs least.  Give `remove` or `layers`.

    Attributes:
        remove: share of the blocks (below 1), or of their parts, or their number.
        layers: blocks to remove, in place of ``remove``: numbers from 0, ranges such as ``2-4``, names of modules.
        part: what goes: whole blocks (``block``), their ``attention`` (recurrent layers too), their feed-forward
            networks (``ffn``), or ``either`` of these two, each ranked on its own.
        ranking: ``iterative`` removes what changes the residual stream least (1 - cosine, ShortGPT), and ranks anew
            after each; ``influence`` ranks once; ``perplexity`` removes what the loss of next tokens suffers least from
            (SLEB), which takes as many runs as there are layers, for each that goes.
        keep_first: blocks at the beginning that stay.
        keep_last: blocks at the end that stay.
        compare_halves: rank on each half of the samples as well, and say how far the choices agree.
    """

    inexact = "decides as it runs which layers go, and they differ: name blocks in `layers`"

    remove: float | None = None
    layers: int | str | tuple[int | str, ...] | None = None
    part: Part = "block"
    ranking: Ranking = "iterative"
    keep_first: int = 1
    keep_last: int = 1
    compare_halves: bool = True

    def __post_init__(self) -> None:
        if (self.remove is None) == (self.layers is None):
            raise UsageError(f"{_NAME}: give `remove`, a share or a number, or `layers`, and not both")
        if self.remove is not None and not (0 < self.remove < 1 or (self.remove >= 1 and self.remove % 1 == 0)):
            raise UsageError(f"{_NAME}: remove {self.remove:g} is neither a share between 0 and 1 nor a whole number")
        if self.layers is not None and self.part == "either":
            raise UsageError(f"{_NAME}: with `layers`, say which part goes: block, attention or ffn")
        if min(self.keep_first, self.keep_last) < 0:
            raise UsageError(f"{_NAME}: keep_first and keep_last are not below 0")

    @property
    def runs_samples(self) -> bool:
        """True where layers are ranked."""
        return self.remove is not None

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return whether all layers that compete are alike."""
        if self.remove is None:
            return True
        return are_alike([layer for layer in self._all(graph) if not layer.is_kept and not layer.reason])

    def forward_samples(self, graph: GraphModule, samples: int) -> float:
        """Return the samples of all runs through the model, as if each half took half as long."""
        if self.remove is None:
            return 0.0
        count, layers = self._count(graph), len(self._all(graph))
        each = {"influence": 1.0, "iterative": float(count), "perplexity": count * (1 + layers / 2)}[self.ranking]
        return each * samples * (2 if self.compare_halves else 1)

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse blocks that the model has not, too many of them, and a loss that it has not."""
        info: ModelInfo = graph.meta["model"]
        if any(node.target in KEPT for node in graph.graph.nodes):
            raise UsageError(f"{_NAME}: later layers run kept tokens alone; put it in front of swift_kv")
        if self.ranking == "perplexity" and self.remove is not None and (info.hears or not info.generates):
            raise UsageError(
                f"{_NAME}: {info.name} predicts no next tokens of text; take ranking iterative or influence"
            )
        if self.remove is None:
            self._named(graph)
        else:
            self._count(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Choose the layers, say how sure the choice is, and remove them."""
        if self.remove is None:
            gone = self._named(graph)
        else:
            layers, count = self._all(graph), self._count(graph)
            gone = layers_to_remove(graph, ctx, _NAME, layers, count, self.ranking, self.compare_halves)
        remove_layers(graph, ctx, _NAME, gone)
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Remove as many layers of a graph without weights: where they differ, those with the fewest bytes."""
        if self.remove is None:
            return plan_layers(graph, self._named(graph))
        free = [layer for layer in self._all(graph) if not layer.is_kept and not layer.reason]
        count = self._count(graph)
        smallest = sorted(free, key=lambda layer: layer_bytes(graph, layer))[:count]
        if not self.plans_sizes(graph):
            ctx.notes.append(
                f"{_NAME}: planned as if the smallest went: {', '.join(layer.name for layer in smallest)}; the run "
                "decides on the samples"
            )
        return plan_layers(graph, sorted(smallest, key=lambda layer: layer.number))

    def _all(self, graph: GraphModule) -> list[Layer]:
        return find_layers(graph, _NAME, self.part, self.keep_first, self.keep_last)

    def _named(self, graph: GraphModule) -> list[Layer]:
        wanted = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        return named_layers(graph, _NAME, self._all(graph), [each for each in wanted if each is not None])

    def _count(self, graph: GraphModule) -> int:
        return count_removed(graph, _NAME, self._all(graph), self.remove or 0)
