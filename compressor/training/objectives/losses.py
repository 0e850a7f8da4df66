"""Losses, each a mean over rows: next tokens, a teacher's predictions, a teacher's hidden states.

Sums of whole tensors are taken in pieces of one size, so that their bits do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from compressor.numerics.products.deterministic import total


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each token after the first, in nats.

    Args:
        logits: float32 [B, S, V]; row i predicts token i + 1.
        ids: int64 [B, S].
    """
    rows = logits[:, :-1].flatten(0, 1)
    losses = cross_entropy(rows, ids[:, 1:].flatten().to(rows.device), reduction="none")
    return total(losses) / len(losses)


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 times the mean over rows of KL(teacher || student), both softened by T (Hinton et al. 2015).

    The factor keeps the gradient's size as T grows.

    Args:
        student, teacher: logits, float [..., V].
    """
    q, p = (log_softmax(logits.flatten(0, -2) / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * total((p.exp() * (p - q)).sum(1)) / len(p)


def hidden_error(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return the mean over rows and places of ||s - t||^2 / ||t||^2.

    Args:
        student, teacher: float [..., D], of the same places.
    """
    errors = []
    for s, t in zip(student, teacher, strict=True):
        s, t = s.flatten(0, -2), t.flatten(0, -2)
        ratio = (s - t).square().sum(1) / t.square().sum(1).clamp_min(torch.finfo(t.dtype).tiny)
        errors.append(total(ratio) / len(ratio))
    return torch.stack(errors).mean()
