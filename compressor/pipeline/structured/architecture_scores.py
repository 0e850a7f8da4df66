"""Score architectures: how far the model's predictions move on text, with a standard error.

One sub-layer is replaced, and only what follows it runs (Puzzle, arXiv 2411.19146, section 3, "replace-1-block").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.graph.segments import cut_at
from compressor.pipeline.structured.architecture import Picks, masked
from compressor.search.space import AS_IS, Starts, SubLayer


@dataclass(frozen=True)
class Score:
    """A divergence from the dense model's predictions: KL(dense || architecture), nats a token.

    Attributes:
        mean: over all tokens.
        error: standard error of the mean, by the spread of the samples' means.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


class Scores:
    """Score architectures of one graph on the same text.

    Args:
        graph: whole, its channels sorted.
        ids: text that nothing was fitted to, int64 [samples, sequence], at least two samples.
        starts: weights of the alternatives (:func:`compressor.pipeline.structured.architecture_starts.sort_parts`).
    """

    def __init__(self, graph: GraphModule, layers: Sequence[SubLayer], starts: Starts, ids: Tensor) -> None:
        self._graph, self._layers, self._starts = graph, layers, starts
        self.samples = len(ids)
        self._batches = split_samples(graph, ids, MICRO_BATCH_TOKENS)
        stream = SegmentRunner(graph, self._batches)
        entries = list(dict.fromkeys(layer.branch.entry for layer in layers))
        self._hidden: dict[Node, list[Tensor | None]] = {}
        *before, last = cut_at(graph, entries)
        for segment in before:
            stream.advance(segment)
            assert segment.exit is not None
            self._hidden[segment.exit] = [None if one is None else one.clone() for one in stream.hidden]
        self._dense = [stream.values(last, i, [_logits(graph)])[0] for i in range(len(self._batches))]

    def of(self, picks: Picks) -> Score:
        """Return the score of an architecture; 0 where every sub-layer is as it is.

        The oracle is running both graphs whole.
        """
        first = next((x for x, one in zip(self._layers, picks, strict=True) if one.label != AS_IS), None)
        if first is None:
            return Score(0.0, 0.0)
        changed = masked(self._graph, self._layers, picks, self._starts)
        entry = next(node for node in changed.graph.nodes if node.name == first.branch.entry.name)
        stream = SegmentRunner(changed, self._batches)
        stream.hidden = list(self._hidden[first.branch.entry])
        _, last = cut_at(changed, [entry])
        means = [
            divergences(dense, stream.values(last, i, [_logits(changed)])[0]) for i, dense in enumerate(self._dense)
        ]
        every = torch.cat(means)
        return Score(float(every.mean()), float(every.std() / len(every) ** 0.5))


def divergences(dense: Tensor, other: Tensor) -> Tensor:
    """Return KL(dense || other) of each sample, the mean over its tokens, float64 [samples].

    Args:
        dense, other: logits [samples, sequence, vocabulary].
    """
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, other))
    return (p.exp() * (p - q)).sum(-1).mean(-1).clamp(min=0.0)


def _logits(graph: GraphModule) -> Node:
    output: Node = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    return output
