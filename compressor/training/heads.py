"""Train heads that draft: the distance of their predictions to the model's own, and how often they agree.

Logits of token t say what comes at t + 1.  Head i, which knows the token at t + 1, says what comes at t + 1 + i: what
the model says at t + i, where it reads the text as it went on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.training.losses import divergence
from compressor.training.trainable import TrainableGraph


def heads_loss(drafts: Tensor, logits: Tensor) -> Tensor:
    """Return the mean over heads of KL(model || head): that of Medusa (arXiv 2401.10774), with the model as teacher.

    Args:
        drafts: float32 [B, S, heads, V].
        logits: of the model, float32 [B, S, V], S greater than the number of heads.
    """
    count, length = drafts.shape[2], drafts.shape[1]
    losses = [divergence(drafts[:, : length - i, i - 1], logits[:, i:], 1.0) for i in range(1, count + 1)]
    return torch.stack(losses).mean()


@torch.no_grad()
def agreement(model: TrainableGraph, samples: Tensor, batch: int, ranks: Sequence[int]) -> list[list[float]]:
    """Return, of each head, how often the model's likeliest token is among its likeliest, by how many are looked at.

    Args:
        model: whose one point is the heads' output.
        samples: int64 [n, S].
        batch: samples that run at once.
        ranks: how many of the likeliest are looked at, each at most the vocabulary.
    """
    hits: list[list[int]] = []
    seen: list[int] = []
    for part in torch.split(samples, batch):
        outputs = model(part)
        (drafts,), wanted = outputs.hidden, outputs.last.argmax(-1)
        hits = hits or [[0] * len(ranks) for _ in range(drafts.shape[2])]
        seen = seen or [0] * drafts.shape[2]
        for i in range(1, drafts.shape[2] + 1):
            found = drafts[:, : drafts.shape[1] - i, i - 1].topk(max(ranks)).indices == wanted[:, i:, None]
            seen[i - 1] += found[..., 0].numel()
            hits[i - 1] = [old + int(found[..., :k].sum()) for old, k in zip(hits[i - 1], ranks, strict=True)]
    return [[count / total for count in counts] for counts, total in zip(hits, seen, strict=True)]
