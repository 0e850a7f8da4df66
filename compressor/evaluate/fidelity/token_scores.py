"""Add up, token by token, how likely a model found a text, and how near it is to the dense one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.mean import BlockMean


class TokenScores:
    """Add up how likely a model, and the dense one beside it, found the right next tokens.

    Log-likelihoods are computed in float64 from float32 logits.

    Args:
        temperatures: at which the divergence is measured as well: of softmax(logits / temperature), which sampling
            draws from.
    """

    def __init__(self, temperatures: Sequence[float] = ()) -> None:
        self._at = {temperature: BlockMean() for temperature in temperatures}
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
        self._divergence.add(_divergence(p, x))
        for temperature, mean in self._at.items():
            mean.add(_divergence(*(torch.log_softmax(logs / temperature, dim=-1) for logs in (p, x))))
        self._agreed.add((p.argmax(1) == x.argmax(1)).double())

    def result(self) -> EvalResult:
        """Return perplexities, divergence and agreement."""
        low, high = self._loss.interval
        intervals = {"perplexity": (bounded_exp(low), bounded_exp(high))}
        result = EvalResult(perplexity=bounded_exp(self._loss.mean), tokens=self._loss.count, intervals=intervals)
        if not self._dense_loss.count:
            return result
        low, high = self._increase.interval
        intervals["perplexity_increase"] = (bounded_exp(low) - 1, bounded_exp(high) - 1)
        intervals |= {"kl_divergence": self._divergence.interval, "top1_agreement": self._agreed.fraction_interval}
        if self._at:
            worst = max(self._at, key=lambda temperature: self._at[temperature].mean)
            intervals["swept_kl_divergence"] = self._at[worst].interval
            result = dataclasses.replace(result, swept_kl_divergence=self._at[worst].mean, swept_temperature=worst)
        return dataclasses.replace(
            result,
            dense_perplexity=bounded_exp(self._dense_loss.mean),
            kl_divergence=self._divergence.mean,
            top1_agreement=self._agreed.mean,
        )


def _divergence(p: Tensor, x: Tensor) -> Tensor:
    """Return KL(p || x) of each row, in nats, of logarithms [n, V]."""
    return (p.exp() * (p - x)).sum(1)


def bounded_exp(x: float) -> float:
    """Return e to the x, infinity where float64 has no such number."""
    return math.exp(x) if x < 700 else math.inf
