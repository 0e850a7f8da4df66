"""Measure quality by one definition for the Hugging Face model, the graph and the bundle.

A model is any callable that maps ids int64 [B, S] to logits float32 [B, S, V].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, run_outputs
from compressor.data.images import Images
from compressor.errors import UsageError
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.fidelity.token_scores import TokenScores
from compressor.evaluate.mean import Mean
from compressor.graph.caches import empty_past
from compressor.graph.kinds.draft_heads import without_heads
from compressor.graph.kinds.encoder_decoder import source_inputs
from compressor.graph.model import ModelInfo
from compressor.host.tensor_files import Spill
from compressor.progress import Reporter, Silent

Ids: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = Callable[[Ids], "Tensor | NDArray[np.float32]"]
"""ids [B, S] -> float32 [B, S, V]; row i predicts token i + 1."""
Hidden: TypeAlias = Callable[[Ids, NDArray[np.float32]], "Tensor | NDArray[np.float32]"]
"""An encoder: ids [B, S] and mask [B, S] -> last hidden state [B, S, H]."""
Classes: TypeAlias = Callable[[NDArray[np.float32]], "Tensor | NDArray[np.float32]"]
"""A plain module: images [B, channels, height, width] -> float32 [B, classes]."""


def sliding_windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, scored): run tokens [first, last) and count the last ``scored`` predictions.

    Every token but the first is scored once; beyond the first window each has more than ``window - stride`` tokens of
    context.
    """
    if not 1 <= stride <= window:
        raise UsageError(f"evaluation: stride {stride} is not between 1 and the window, {window}")
    first = done = 0
    while done < tokens - 1:
        last = min(first + window, tokens - 1)
        yield first, last, last - done
        first, done = first + stride, last


def measure_quality(
    logits: Logits,
    tokens: Tensor,
    *,
    window: int = 512,
    stride: int = 256,
    dense: Logits | None = None,
    temperatures: Sequence[float] = (),
    reporter: Reporter | None = None,
) -> EvalResult:
    """Measure perplexity, and fidelity to the dense model if that is given, window by window.

    Args:
        logits: the model.
        tokens: int64 [n], n >= 2.
        window, stride: see :func:`sliding_windows`.
        dense: the reference model.
        temperatures: as of :class:`~compressor.evaluate.fidelity.token_scores.TokenScores`.
    Raises:
        UsageError: there is nothing to score.
    """
    count = len(tokens) - 1
    if count < 1:
        raise UsageError(f"evaluation: {len(tokens)} tokens are too few to predict one from another")
    pieces = [
        (tokens[first:last], tokens[last - scored + 1 : last + 1])
        for first, last, scored in sliding_windows(len(tokens), window, stride)
    ]
    found = measure_pieces(logits, pieces, dense=dense, temperatures=temperatures, reporter=reporter)
    return dataclasses.replace(found, window=window, stride=stride)


def measure_pieces(
    logits: Logits,
    pieces: Sequence[tuple[Tensor, Tensor]],
    *,
    dense: Logits | None = None,
    temperatures: Sequence[float] = (),
    reporter: Reporter | None = None,
) -> EvalResult:
    """Measure as :func:`measure_quality` does, on pieces of text in their order.

    Args:
        pieces: of each, tokens int64 [S] to run, and int64 [n] that come after its last n.
    """
    scores, fed = TokenScores(temperatures), [ids.numpy()[None] for ids, _ in pieces]
    reporter = reporter or Silent()
    ours = _each(logits, fed, reporter)
    reference = None if dense is None else _each(dense, fed, reporter)
    with reporter.task("evaluate", len(pieces)) as task:
        for _, targets in pieces:
            count = len(targets)
            theirs = None if reference is None else next(reference)[0, -count:]
            scores.add(targets, next(ours)[0, -count:], theirs)
            task.advance()
    return scores.result()


def _each(model: Logits, fed: Sequence[Ids], reporter: Reporter) -> Iterator[Tensor]:
    """Yield the logits of each window; a graph in PyTorch takes all windows through one segment after another."""
    if isinstance(model, GraphLogits):
        return model.windows(fed, reporter)
    return (torch.as_tensor(model(ids)) for ids in fed)


@torch.no_grad()
def measure_accuracy(
    classify: Classes, images: Images, *, batch: int, dense: Classes | None = None, reporter: Reporter | None = None
) -> EvalResult:
    """Measure accuracy, and fidelity to the dense model if that is given, over all images, batch by batch.

    The last batch is padded with copies of its first image, which are not counted.

    Args:
        classify: the model.
        images: with labels.
    Raises:
        UsageError: the model's outputs are not a row of classes for each image.
    """
    assert images.labels is not None
    count = len(images.labels)
    right, dense_right, drop, agreed, divergence = (Mean() for _ in range(5))
    with (reporter or Silent()).task("evaluate", count) as task:
        for first in range(0, count, batch):
            x, labels = images.inputs(slice(first, first + batch)), images.labels[first : first + batch]
            fed = torch.cat([x, x[:1].expand(batch - len(x), -1, -1, -1)]).numpy()
            scores = _classes(classify(fed), batch)[: len(x)]
            hits = (scores.argmax(1) == labels).double()
            right.add(hits)
            if dense is not None:
                reference = _classes(dense(fed), batch)[: len(x)]
                dense_hits = (reference.argmax(1) == labels).double()
                dense_right.add(dense_hits)
                drop.add(dense_hits - hits)
                agreed.add((reference.argmax(1) == scores.argmax(1)).double())
                divergence.add((reference.exp() * (reference - scores)).sum(1))
            task.advance(len(x))
    intervals = {"accuracy": right.fraction_interval}
    result = EvalResult(accuracy=right.mean, images=count, intervals=intervals)
    if dense is None:
        return result
    intervals |= {"accuracy_drop": drop.interval, "top1_agreement": agreed.fraction_interval}
    return dataclasses.replace(
        result,
        dense_accuracy=dense_right.mean,
        kl_divergence=divergence.mean,
        top1_agreement=agreed.mean,
        intervals={**intervals, "kl_divergence": divergence.interval},
    )


def _classes(outputs: Tensor | NDArray[np.float32], batch: int) -> Tensor:
    """Return log-probabilities, float64 [batch, classes]."""
    logits = torch.as_tensor(outputs)
    if logits.dim() != 2 or len(logits) != batch:
        raise UsageError(
            f"evaluation: the model gives {list(logits.shape)} for {batch} images; wanted: [{batch}, classes]"
        )
    return torch.log_softmax(logits.double(), dim=1)


def graph_classes(graph: GraphModule) -> Classes:
    """Return a function that runs a captured module of one output in PyTorch."""

    @torch.no_grad()
    def classify(x: NDArray[np.float32]) -> Tensor:
        result: Tensor = graph(torch.as_tensor(x))
        return result

    return classify


def image_batch(graph: GraphModule, most: int) -> int:
    """Return the batch size that a captured module was fixed to, or ``most`` if it takes any."""
    fixed = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    return fixed if isinstance(fixed, int) else most


class GraphLogits:
    """A captured decoder or encoder-decoder, run in PyTorch from an empty cache, without heads that draft.

    Args:
        run: an interpreter of the graph; the graph itself if left out.
        spill: store for the hidden states of many batches; None keeps them in memory.
    """

    def __init__(self, graph: GraphModule, run: Callable[..., Any] | None = None, spill: Spill | None = None) -> None:
        self.graph = without_heads(graph)
        self.run, self.spill = run or self.graph, spill

    @torch.no_grad()
    def __call__(self, ids: Ids, source: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits of one batch.

        Args:
            source: the inputs of an encoder-decoder's encoder; None gives it the ids too.
        """
        info: ModelInfo = self.graph.meta["model"]
        position, tokens = torch.arange(ids.shape[1]), torch.as_tensor(ids)
        more = source_inputs(info, tokens) if source is None else source
        result: Tensor = self.run(tokens, position, position, *empty_past(info, len(ids)), *more)[0]
        return result

    def windows(self, fed: Sequence[Ids], reporter: Reporter) -> Iterator[Tensor]:
        """Yield the logits of many batches, with one segment's weights in memory at a time."""
        return run_outputs(SegmentRunner(self.graph, [torch.as_tensor(ids) for ids in fed], self.spill), reporter)


def graph_hidden(graph: GraphModule, run: Callable[..., Any] | None = None) -> Hidden:
    """Return a function that runs a captured encoder in PyTorch; ``run`` may be an interpreter of the graph."""

    @torch.no_grad()
    def hidden(ids: Ids, mask: NDArray[np.float32]) -> Tensor:
        result: Tensor = (run or graph)(torch.as_tensor(ids), torch.as_tensor(mask))
        return result

    return hidden
