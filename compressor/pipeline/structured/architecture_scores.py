"""Score architectures: how far the model's predictions move on text or images, with a standard error.

One sub-layer is replaced, and only what follows it runs (Puzzle, arXiv 2411.19146, section 3, "replace-1-block").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.calibration.programs import Program, run_program
from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.calibration.suffixes import write_suffix
from compressor.errors import UsageError
from compressor.executor.jobs import Executor, InProcess
from compressor.graph.segments import cut_at
from compressor.pipeline.structured.architecture import Picks, masked
from compressor.progress import Reporter, Silent, Task
from compressor.search.space import AS_IS, Starts, SubLayer

_JOB = f"{__name__}:suffix_divergences"


@dataclass(frozen=True)
class Score:
    """A divergence from the dense model's predictions: KL(dense || architecture), nats a token, or an image.

    Attributes:
        mean: over all tokens or images.
        error: standard error of the mean, by the spread of the samples' means.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


class Scores:
    """Score architectures of one graph on the same text or images.

    Args:
        graph: whole, its channels sorted.
        ids: text that nothing was fitted to, int64 [samples, sequence], or images, float32 [samples, channels, height,
            width]; at least two samples.
        starts: weights of the alternatives (:func:`compressor.pipeline.structured.architecture_starts.sort_parts`).
    """

    def __init__(self, graph: GraphModule, layers: Sequence[SubLayer], starts: Starts, ids: Tensor) -> None:
        check_held_out(ids)
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
        """Return the score of one architecture, computed in this process."""
        return self.all([picks], InProcess(), Silent(), Silent())[0]

    def all(self, several: Sequence[Picks], executor: Executor, task: Task, reporter: Reporter) -> list[Score]:
        """Return the score of each architecture; 0 where every sub-layer is as it is.

        The oracle is running both graphs whole.
        """
        changed = [picks for picks in several if self._first(picks) is not None]
        found = iter(executor.run(_JOB, map(self._job, changed), task, reporter))
        scores = []
        for picks in several:
            if self._first(picks) is None:
                scores.append(Score(0.0, 0.0))
                task.advance()
            else:
                every = torch.tensor(next(found), dtype=torch.float64)
                scores.append(Score(float(every.mean()), float(every.std() / len(every) ** 0.5)))
        return scores

    def _first(self, picks: Picks) -> SubLayer | None:
        """Return the first sub-layer that changes."""
        pairs = zip(self._layers, picks, strict=True)
        return next((layer for layer, one in pairs if one.label != AS_IS), None)

    def _job(self, picks: Picks) -> dict[str, Any]:
        """Return the arguments of :func:`suffix_divergences` for an architecture."""
        first = self._first(picks)
        assert first is not None
        changed = masked(self._graph, self._layers, picks, self._starts)
        entry = next(node for node in changed.graph.nodes if node.name == first.branch.entry.name)
        stream = SegmentRunner(changed, self._batches)
        stream.hidden = list(self._hidden[first.branch.entry])
        _, last = cut_at(changed, [entry])
        return {**write_suffix(stream, last), "dense": self._dense}


def check_held_out(ids: Tensor) -> None:
    """Refuse too few samples to score on.

    Raises:
        UsageError: there is one alone.
    """
    if len(ids) < 2:
        what = f"{len(ids)} sample is held out, and a standard error takes two"
        raise UsageError(f"{what}: give more calibration samples, or raise held_out")


def suffix_divergences(
    program: Program, output: str, held: dict[str, Tensor], batches: list[dict[str, Any]], dense: list[Tensor]
) -> list[float]:
    """Return KL(dense || architecture) of each sample, nats a token, of an architecture whose rest is a program.

    Args:
        output: the node with the logits.
        held: parameters and constants by node.
        batches: hidden states and what depends on shapes, by node, of each batch.
        dense: logits of the dense model, of each batch.
    """
    found = list[float]()
    for values, expected in zip(batches, dense, strict=True):
        found += divergences(expected, run_program(program, {**held, **values}, output)).tolist()
    return found


def divergences(dense: Tensor, other: Tensor) -> Tensor:
    """Return KL(dense || other) of each sample, the mean over its tokens, float64 [samples].

    Args:
        dense, other: logits [samples, sequence, vocabulary], or [samples, classes].
    """
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, other))
    lost = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
    return lost if lost.dim() == 1 else lost.mean(-1)


def _logits(graph: GraphModule) -> Node:
    output: Node = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
    return output
