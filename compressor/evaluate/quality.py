"""Measure quality by one definition for the Hugging Face model, the graph and the bundle.

A model is any callable that maps ids int64 [B, S] to logits float32 [B, S, V].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, run_outputs
from compressor.data.images import Images
from compressor.errors import UsageError
from compressor.evaluate.mean import BlockMean, Mean
from compressor.graph.caches import empty_past
from compressor.graph.kinds.draft_heads import without_heads
from compressor.graph.kinds.encoder_decoder import source_inputs
from compressor.graph.model import ModelInfo
from compressor.host.tensor_files import Spill
from compressor.progress import Reporter, Silent

_COMPARED = ("perplexity_increase", "accuracy_drop", "word_error_increase", "character_error_increase")
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
        word_error_rate, character_error_rate: edits that turn what a model of speech heard into what was said, over the
            words or characters of that; likewise of the dense model.
        continuation_agreement: share of the tokens of greedy continuations in front of the first that is not the dense
            model's, over prompts of the text.
        repetition, dense_repetition: share of 4-grams in continuations that were in them before; likewise of the dense
            model.
        continuations, continuation_tokens: number of prompts, and of tokens that continue each.
        tokens, texts, images, sounds: number of scored tokens, texts, images or sounds.
        window, stride: size and stride of the sliding window, in tokens.
        intervals: of figures that are means, 95% confidence: over tokens by bootstrap over blocks of text
            (:class:`compressor.evaluate.mean.BlockMean`), over images as if these were independent.
    """

    perplexity: float | None = None
    dense_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    accuracy: float | None = None
    dense_accuracy: float | None = None
    embedding_cosine: float | None = None
    embedding_cosine_min: float | None = None
    word_error_rate: float | None = None
    dense_word_error_rate: float | None = None
    character_error_rate: float | None = None
    dense_character_error_rate: float | None = None
    continuation_agreement: float | None = None
    repetition: float | None = None
    dense_repetition: float | None = None
    continuations: int | None = None
    continuation_tokens: int | None = None
    texts: int | None = None
    sounds: int | None = None
    images: int | None = None
    tokens: int | None = None
    window: int | None = None
    stride: int | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def perplexity_increase(self) -> float | None:
        """Increase of the perplexity relative to dense: 0.03 is 3% more."""
        if self.perplexity is None or self.dense_perplexity is None:
            return None
        return self.perplexity / self.dense_perplexity - 1

    @property
    def accuracy_drop(self) -> float | None:
        """Accuracy lost relative to the dense model, as a difference of fractions: 0.003 is 0.3 points."""
        return _difference(self.dense_accuracy, self.accuracy)

    @property
    def word_error_increase(self) -> float | None:
        """Word error rate above the dense model's, as a difference of fractions: 0.01 is one more in 100 words."""
        return _difference(self.word_error_rate, self.dense_word_error_rate)

    @property
    def character_error_increase(self) -> float | None:
        """Character error rate above the dense model's, as a difference of fractions."""
        return _difference(self.character_error_rate, self.dense_character_error_rate)

    def metrics(self) -> dict[str, Any]:
        """Return everything that was measured, by JSON name; intervals as ``<name>_interval``, [low, high]."""
        values = {key: value for key, value in vars(self).items() if key != "intervals"}
        values |= {f"{name}_interval": list(ends) for name, ends in self.intervals.items()}
        values |= {name: getattr(self, name) for name in _COMPARED}
        return {name: value for name, value in values.items() if value is not None}


def _difference(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less


class TokenScores:
    """Add up how likely a model, and the dense one beside it, found the right next tokens.

    Log-likelihoods are computed in float64 from float32 logits.
    """

    def __init__(self) -> None:
        self._loss, self._dense_loss, self._increase, self._divergence, self._agreed = (BlockMean() for _ in range(5))

    def add(self, targets: Tensor, logits: Tensor, dense: Tensor | None) -> None:
        """Count the predictions of some tokens.

        Args:
            targets: int64 [n], the right tokens.
            logits, dense: float32 [n, V], of both models; None without a dense one.
        """
        x = torch.log_softmax(logits.detach().double(), dim=-1)
        losses = -x.gather(1, targets[:, None])
        self._loss.add(losses)
        if dense is None:
            return
        p = torch.log_softmax(dense.detach().double(), dim=-1)
        dense_losses = -p.gather(1, targets[:, None])
        self._dense_loss.add(dense_losses)
        self._increase.add(losses - dense_losses)
        self._divergence.add((p.exp() * (p - x)).sum(1))
        self._agreed.add((p.argmax(1) == x.argmax(1)).double())

    def result(self) -> EvalResult:
        """Return perplexities, divergence and agreement."""
        low, high = self._loss.interval
        intervals = {"perplexity": (_exp(low), _exp(high))}
        result = EvalResult(perplexity=_exp(self._loss.mean), tokens=self._loss.count, intervals=intervals)
        if not self._dense_loss.count:
            return result
        low, high = self._increase.interval
        intervals["perplexity_increase"] = (_exp(low) - 1, _exp(high) - 1)
        intervals |= {"kl_divergence": self._divergence.interval, "top1_agreement": self._agreed.fraction_interval}
        return dataclasses.replace(
            result,
            dense_perplexity=_exp(self._dense_loss.mean),
            kl_divergence=self._divergence.mean,
            top1_agreement=self._agreed.mean,
        )


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
    ids, scores = tokens.numpy(), TokenScores()
    spans = list(sliding_windows(len(ids), window, stride))
    fed = [ids[None, first:last] for first, last, _ in spans]
    reporter = reporter or Silent()
    ours = _each(logits, fed, reporter)
    reference = None if dense is None else _each(dense, fed, reporter)
    with reporter.task("evaluate", len(spans)) as task:
        for _, last, scored in spans:
            theirs = None if reference is None else next(reference)[0, -scored:]
            scores.add(tokens[last - scored + 1 : last + 1], next(ours)[0, -scored:], theirs)
            task.advance()
    return dataclasses.replace(scores.result(), window=window, stride=stride)


def _each(model: Logits, fed: Sequence[Ids], reporter: Reporter) -> Iterator[Tensor]:
    """Yield the logits of each window; a graph in PyTorch takes all windows through one segment after another."""
    if isinstance(model, GraphLogits):
        return model.windows(fed, reporter)
    return (torch.as_tensor(model(ids)) for ids in fed)


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
