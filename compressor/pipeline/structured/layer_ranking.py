"""Rank the parts of a model by what it loses without them, on calibration samples.

``influence``    how much a part changes the residual stream: 1 - cosine (ShortGPT, arXiv 2403.03853, eq. 1), once
``iterative``    the same, of the model that is left after each removal
``perplexity``   what the loss of the next tokens is without it, after each removal (SLEB, arXiv 2402.09025, sec. 3.2);
                 of a network of images, the loss of the classes that the whole network predicts

Nothing is rewritten for it: a part is left out of a run by not running its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import cross_entropy

from compressor.calibration.segment_runner import SegmentRunner, run_outputs, split_samples
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.graph.blocks import Branch, Together
from compressor.graph.kinds.encoder_decoder import Batch, SampleInputs, tokens_of
from compressor.graph.segments import cut_at, narrow_points, token_nodes
from compressor.host.tensor_files import Spill
from compressor.numerics.influence import influences
from compressor.progress import Silent

Ranking: TypeAlias = Literal["iterative", "influence", "perplexity"]


@dataclass(frozen=True)
class Layer(Together):
    """Hold what goes as one: a transformer block, or a branch of it.

    Attributes:
        name: for people.
        number: among those of its model.
        branches: those that go, in order.
        is_kept: it is among the first or last blocks, which stay.
    """

    name: str
    number: int
    branches: tuple[Branch, ...]
    is_kept: bool

    @property
    def terms(self) -> tuple[Node, ...]:
        """Return its summands, if one that stays may be added at the same place; else nothing."""
        return () if len({branch.part for branch in self.branches}) > 1 else self.branches[0].terms


@dataclass(frozen=True)
class Removal:
    """A layer that goes, and its score in the model that is left by then: its influence, or the loss without it."""

    layer: Layer
    score: float


Remember: TypeAlias = Callable[[Sequence[int], Callable[[], Tensor]], Tensor]
"""Return scores, float64 [candidates], of a model without the layers of these numbers; computed where none are kept."""


def choose_layers(
    graph: GraphModule,
    ids: SampleInputs,
    layers: Sequence[Layer],
    count: int,
    ranking: Ranking,
    remember: Remember,
    spill: Spill | None = None,
) -> list[Removal]:
    """Choose the layers to remove, in the order in which they go.

    Args:
        layers: all of them; those that stay are not chosen.
        ids: calibration samples.
    """
    batches = split_samples(graph, ids, MICRO_BATCH_TOKENS)
    walk, found = _Walk(graph, batches, layers, spill), list[Removal]()
    while len(found) < count:
        gone = [removal.layer for removal in found]
        left = [layer for layer in layers if not layer.is_kept and layer not in gone]
        scores = remember([layer.number for layer in gone], lambda g=gone, c=left: walk.scores(ranking, g, c))  # type: ignore[misc]
        order = torch.argsort(scores, stable=True).tolist()
        taken = order[: count if ranking == "influence" else 1]
        found += [Removal(left[i], float(scores[i])) for i in taken]
    return found


class _Walk:
    """Samples on their way through a model without some of its layers."""

    def __init__(
        self, graph: GraphModule, batches: Sequence[Batch], layers: Sequence[Layer], spill: Spill | None
    ) -> None:
        self._graph, self._batches, self._spill = graph, batches, spill
        alone = {node for _, node in narrow_points(graph, token_nodes(graph))}
        ends = {node for layer in layers for node in (layer.entry, layer.exit) if node in alone}
        self._cut = cut_at(graph, [node for node in graph.graph.nodes if node in ends])
        self._layers = [[layer for layer in layers if layer.entry is segment.entry] for segment in self._cut]

    @cached_property
    def _expected(self) -> list[Tensor]:
        """The classes whose loss is taken, of each batch: its next tokens, or what the whole network predicts of it."""
        if self._graph.meta["model"].kind != "module":
            return [tokens_of(batch)[:, 1:].flatten() for batch in self._batches]
        stream = SegmentRunner(self._graph, self._batches, self._spill)
        return [outputs.argmax(1) for outputs in run_outputs(stream, Silent())]

    def scores(self, ranking: Ranking, gone: Sequence[Layer], candidates: Sequence[Layer]) -> Tensor:
        """Return the score of each candidate in the model without some layers, float64 [candidates]."""
        stream = SegmentRunner(self._graph, self._batches, self._spill)
        found: dict[int, float] = {}
        for place, layers in enumerate(self._layers):
            here = [layer for layer in candidates if layer in layers]
            if ranking == "perplexity":
                for layer in here:
                    found[layer.number] = self._loss(stream.fork(), place, [*gone, layer])
                self._pass(stream, place, gone)
            else:
                found |= self._pass(stream, place, gone, here)
            if len(found) == len(candidates):
                break
        return torch.tensor([found[layer.number] for layer in candidates], dtype=torch.float64)

    def _pass(
        self, stream: SegmentRunner, place: int, gone: Sequence[Layer], measured: Sequence[Layer] = ()
    ) -> dict[int, float]:
        """Run all batches through a segment without what has gone, and return the influence of those to measure."""
        segment, dropped = self._cut[place], [layer for layer in self._layers[place] if layer in gone]
        if any(not layer.terms for layer in dropped):
            stream.skip(segment)
            return {}
        terms = [term for layer in (*dropped, *measured) for term in layer.terms]
        changes: dict[int, list[Tensor]] = {layer.number: [] for layer in measured}

        def take(i: int, values: list[Tensor]) -> Tensor:
            known = dict(zip(terms, values[1:], strict=True))
            left = values[0] - sum(known[term] for layer in dropped for term in layer.terms) if dropped else values[0]
            for layer in measured:
                without = left - sum(known[term] for term in layer.terms) if layer.terms else stream.hidden[i]
                assert isinstance(without, Tensor)
                changes[layer.number].append(influences(without, left).double())
            return left

        if segment.exit is not None:
            stream.advance(segment, terms, take)
        elif measured:
            for i in range(len(stream.batches)):
                take(i, stream.values(segment, i, [measured[0].exit, *terms]))
        return {number: float(torch.cat(parts).mean()) for number, parts in changes.items()}

    def _loss(self, stream: SegmentRunner, place: int, gone: Sequence[Layer]) -> float:
        """Return the mean loss of a next token or a class in float64, of batches that are as far as a segment's
        beginning.
        """
        *_, last = self._cut
        for number in range(place, len(self._cut) - 1):
            self._pass(stream, number, gone)
        logits: Node = self._graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        total, count = 0.0, 0
        for i, expected in enumerate(self._expected):
            rows = stream.values(last, i, [logits])[0]
            rows = rows if rows.dim() == 2 else rows[:, :-1].flatten(0, 1)
            total += float(cross_entropy(rows.double(), expected, reduction="sum"))
            count += len(expected)
        stream.release(last)
        return total / count
