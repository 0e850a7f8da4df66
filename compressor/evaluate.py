"""Quality, by one definition for the Hugging Face model, the graph and the bundle.

A model is whatever maps ids int64 [B, S] to logits [B, S, V].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.gates import Gate
from compressor.graph import ModelInfo
from compressor.pipeline import Reporter, Silent

Ids: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = Callable[[Ids], "Tensor | NDArray[np.float32]"]
"""ids [B, S] -> float32 [B, S, V]; row i predicts token i + 1."""
Hidden: TypeAlias = Callable[[Ids, NDArray[np.float32]], "Tensor | NDArray[np.float32]"]
"""An encoder: ids [B, S], mask [B, S] -> last hidden state [B, S, H]."""


@dataclass(frozen=True)
class EvalResult:
    """The quality that was measured; None is what was not.  The names are those of the JSON output.

    Attributes:
        perplexity, dense_perplexity: exp of the mean negative log-likelihood of a token.
        kl_divergence: mean over tokens of KL(dense || compressed), in nats.
        top1_agreement: fraction of tokens whose likeliest prediction is the dense model's.
        cosine_fidelity: encoders: mean cosine of the last hidden states with the dense model's.
        tokens: number of scored tokens.
        window, stride: of the sliding window, in tokens.
    """

    perplexity: float | None = None
    dense_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    cosine_fidelity: float | None = None
    tokens: int | None = None
    window: int | None = None
    stride: int | None = None

    @property
    def perplexity_increase(self) -> float | None:
        """Relative to dense: 0.03 is 3% more."""
        if self.perplexity is None or self.dense_perplexity is None:
            return None
        return self.perplexity / self.dense_perplexity - 1

    def metrics(self) -> dict[str, float | int]:
        """Everything that was measured, by JSON name."""
        values = {**dataclasses.asdict(self), "perplexity_increase": self.perplexity_increase}
        return {name: value for name, value in values.items() if value is not None}


def sliding_windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, scored): tokens [first, last) are fed and the last ``scored`` predictions count.

    Every token but the first is scored once; beyond the first window each sees more than ``window - stride``
    tokens before it.
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
    """Perplexity, and fidelity to the dense model where that is given, in one sweep, window by window.

    The log-likelihoods are float64, of float32 logits.

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
    with (reporter or Silent()).task("evaluate", len(spans)) as task:
        for first, last, scored in spans:
            fed, targets = ids[None, first:last], tokens[last - scored + 1 : last + 1, None]
            x = _log_probabilities(logits, fed, scored)
            loss -= float(x.gather(1, targets).sum())
            if dense is not None:
                p = _log_probabilities(dense, fed, scored)
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


def _log_probabilities(logits: Logits, fed: Ids, scored: int) -> Tensor:
    """Float64 [scored, V]."""
    rows = torch.as_tensor(logits(fed))[0, -scored:].detach().double()
    return torch.log_softmax(rows, dim=-1)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@torch.no_grad()
def measure_cosine(hidden: Hidden, dense: Hidden, batches: Iterable[tuple[Ids, NDArray[np.float32]]]) -> EvalResult:
    """Mean cosine between the last hidden states of two encoders over all tokens that the masks keep."""
    total, count = 0.0, 0
    for ids, mask in batches:
        x, y = (torch.as_tensor(model(ids, mask)).double() for model in (hidden, dense))
        cosine = torch.cosine_similarity(x, y, dim=-1)[torch.as_tensor(mask) > 0]
        total, count = total + float(cosine.sum()), count + cosine.numel()
    if not count:
        raise UsageError("evaluation: there is no token to compare hidden states at")
    return EvalResult(cosine_fidelity=total / count, tokens=count)


def graph_logits(graph: GraphModule, run: Callable[..., Any] | None = None) -> Logits:
    """A captured decoder, run in PyTorch from an empty cache; ``run`` may be an interpreter of the graph."""
    info: ModelInfo = graph.meta["model"]

    @torch.no_grad()
    def logits(ids: Ids) -> Tensor:
        position = torch.arange(ids.shape[1])
        caches = [torch.zeros(len(ids), info.kv_heads, 1, info.head_dim)] * info.layers
        result: Tensor = (run or graph)(torch.as_tensor(ids), position, position, caches, caches)[0]
        return result

    return logits


def graph_hidden(graph: GraphModule, run: Callable[..., Any] | None = None) -> Hidden:
    """A captured encoder, run in PyTorch; ``run`` may be an interpreter of the graph."""

    @torch.no_grad()
    def hidden(ids: Ids, mask: NDArray[np.float32]) -> Tensor:
        result: Tensor = (run or graph)(torch.as_tensor(ids), torch.as_tensor(mask))
        return result

    return hidden


@dataclass(frozen=True)
class GateResult:
    """A gate held against what was measured; ``measured`` is None, and the gate failed, where nothing was."""

    gate: Gate
    measured: float | None
    passed: bool

    def __str__(self) -> str:
        found = "not measured" if self.measured is None else f"{self.measured:.6g}"
        return f"{self.gate.metric} {self.gate}: {found}: {'passed' if self.passed else 'FAILED'}"


def check_gates(gates: Sequence[Gate], metrics: Mapping[str, float | int]) -> list[GateResult]:
    """Hold every gate against :meth:`EvalResult.metrics`; ``x dense`` compares with ``dense_<metric>``."""
    results = []
    for gate in gates:
        measured, dense = metrics.get(gate.metric), metrics.get(f"dense_{gate.metric}")
        known = measured is not None and (gate.unit != "x dense" or dense is not None)
        passed = known and measured is not None and gate.holds(measured, dense)
        results.append(GateResult(gate, measured if known else None, passed))
    return results
