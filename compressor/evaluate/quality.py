"""Measure quality by one definition for the Hugging Face model, the graph and the bundle.

A model is any callable that maps ids int64 [B, S] to logits float32 [B, S, V].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, run_outputs
from compressor.data.images import Images
from compressor.errors import UsageError
from compressor.graph.caches import empty_caches
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


@dataclass(frozen=True)
class EvalResult:
    """Measured quality, by the names of the JSON output; None is a figure that was not measured.

    Attributes:
        perplexity, dense_perplexity: exp of the mean negative log-likelihood of a token.
        kl_divergence: mean over tokens, or images, of KL(dense || compressed), in nats.
        top1_agreement: fraction of tokens, or images, whose likeliest prediction is the dense model's.
        accuracy, dense_accuracy: fraction of labelled images whose likeliest class is the label.
        embedding_cosine, embedding_cosine_min: encoders' mean and smallest cosine similarity, over texts, to the dense
            model's embedding.
        tokens, texts, images: number of scored tokens, texts or images.
        window, stride: size and stride of the sliding window, in tokens.
    """

    perplexity: float | None = None
    dense_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    accuracy: float | None = None
    dense_accuracy: float | None = None
    embedding_cosine: float | None = None
    embedding_cosine_min: float | None = None
    texts: int | None = None
    images: int | None = None
    tokens: int | None = None
    window: int | None = None
    stride: int | None = None

    @property
    def perplexity_increase(self) -> float | None:
        """Increase of the perplexity relative to dense: 0.03 is 3% more."""
        if self.perplexity is None or self.dense_perplexity is None:
            return None
        return self.perplexity / self.dense_perplexity - 1

    @property
    def accuracy_drop(self) -> float | None:
        """Accuracy lost relative to the dense model, as a difference of fractions: 0.003 is 0.3 points."""
        if self.accuracy is None or self.dense_accuracy is None:
            return None
        return self.dense_accuracy - self.accuracy

    def metrics(self) -> dict[str, float | int]:
        """Return everything that was measured, by JSON name."""
        values = dataclasses.asdict(self)
        values |= {"perplexity_increase": self.perplexity_increase, "accuracy_drop": self.accuracy_drop}
        return {name: value for name, value in values.items() if value is not None}


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
    reporter: Reporter | None = None,
) -> EvalResult:
    """Measure perplexity, and fidelity to the dense model if that is given, window by window.

    Log-likelihoods are computed in float64 from float32 logits.

    Args:
        logits: the model.
        tokens: int64 [n], n >= 2.
        window, stride: see :func:`sliding_windows`.
        dense: the reference model.
    Raises:
        UsageError: there is nothing to score.
    """
    count = len(tokens) - 1
    if count < 1:
        raise UsageError(f"evaluation: {len(tokens)} tokens are too few to predict one from another")
    ids = tokens.numpy()
    loss = dense_loss = divergence = 0.0
    agreed = 0
    spans = list(sliding_windows(len(ids), window, stride))
    fed = [ids[None, first:last] for first, last, _ in spans]
    reporter = reporter or Silent()
    ours = _each(logits, fed, reporter)
    reference = None if dense is None else _each(dense, fed, reporter)
    with reporter.task("evaluate", len(spans)) as task:
        for _, last, scored in spans:
            targets = tokens[last - scored + 1 : last + 1, None]
            x = _log_probabilities(next(ours), scored)
            loss -= float(x.gather(1, targets).sum())
            if reference is not None:
                p = _log_probabilities(next(reference), scored)
                dense_loss -= float(p.gather(1, targets).sum())
                divergence += float((p.exp() * (p - x)).sum())
                agreed += int((p.argmax(1) == x.argmax(1)).sum())
            task.advance()
    result = EvalResult(perplexity=_exp(loss / count), tokens=count, window=window, stride=stride)
    if dense is None:
        return result
    return dataclasses.replace(
        result,
        dense_perplexity=_exp(dense_loss / count),
        kl_divergence=divergence / count,
        top1_agreement=agreed / count,
    )


def _each(model: Logits, fed: Sequence[Ids], reporter: Reporter) -> Iterator[Tensor]:
    """Yield the logits of each window; a graph in PyTorch takes all windows through one segment after another."""
    if isinstance(model, GraphLogits):
        return model.windows(fed, reporter)
    return (torch.as_tensor(model(ids)) for ids in fed)


def _log_probabilities(logits: Tensor, scored: int) -> Tensor:
    """Return log-probabilities, float64 [scored, V], of the last rows of logits float32 [1, S, V]."""
    return torch.log_softmax(logits[0, -scored:].detach().double(), dim=-1)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


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
    right = dense_right = agreed = 0
    divergence = 0.0
    with (reporter or Silent()).task("evaluate", count) as task:
        for first in range(0, count, batch):
            x, labels = images.inputs(slice(first, first + batch)), images.labels[first : first + batch]
            fed = torch.cat([x, x[:1].expand(batch - len(x), -1, -1, -1)]).numpy()
            scores = _classes(classify(fed), batch)[: len(x)]
            right += int((scores.argmax(1) == labels).sum())
            if dense is not None:
                reference = _classes(dense(fed), batch)[: len(x)]
                dense_right += int((reference.argmax(1) == labels).sum())
                agreed += int((reference.argmax(1) == scores.argmax(1)).sum())
                divergence += float((reference.exp() * (reference - scores)).sum())
            task.advance(len(x))
    result = EvalResult(accuracy=right / count, images=count)
    if dense is None:
        return result
    return dataclasses.replace(
        result, dense_accuracy=dense_right / count, kl_divergence=divergence / count, top1_agreement=agreed / count
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
    """A captured decoder, run in PyTorch from an empty cache.

    Args:
        run: an interpreter of the graph; the graph itself if left out.
        spill: store for the hidden states of many batches; None keeps them in memory.
    """

    def __init__(self, graph: GraphModule, run: Callable[..., Any] | None = None, spill: Spill | None = None) -> None:
        self.graph, self.run, self.spill = graph, run or graph, spill

    @torch.no_grad()
    def __call__(self, ids: Ids) -> Tensor:
        """Return the logits of one batch."""
        info: ModelInfo = self.graph.meta["model"]
        position = torch.arange(ids.shape[1])
        caches = empty_caches(info, len(ids))
        keys, values = caches[: info.layers], caches[info.layers :]
        result: Tensor = self.run(torch.as_tensor(ids), position, position, keys, values)[0]
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
