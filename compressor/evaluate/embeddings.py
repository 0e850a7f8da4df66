"""Compute encoders' text embeddings, and compare those of two models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.embedding_texts import Pooling, Texts
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.quality import Hidden
from compressor.progress import Reporter, Silent


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool hidden states into embeddings, not normalised, float64 [B, H].

    Args:
        hidden: last hidden states [B, S, H].
        mask: [B, S], 1 for tokens and 0 for the padding behind them.
    """
    states = hidden.double()
    kept = mask.bool()[..., None]
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return states.masked_fill(~kept, -torch.inf).amax(1)
    return states.masked_fill(~kept, 0.0).sum(1) / kept.sum(1)


@torch.no_grad()
def measure_embeddings(hidden: Hidden, dense: Hidden, texts: Texts, reporter: Reporter | None = None) -> EvalResult:
    """Measure the mean and the smallest cosine similarity between the embeddings that two encoders give each text."""

    def embedded(model: Callable[..., Tensor | NDArray[np.float32]], *batch: NDArray[np.generic]) -> Tensor:
        return pool(torch.as_tensor(model(*batch)), torch.as_tensor(batch[1]), texts.pooling)

    found: list[Tensor] = []
    with (reporter or Silent()).task("evaluate", len(texts.ids)) as task:
        for ids, mask in texts.batches():
            found.append(torch.cosine_similarity(embedded(hidden, ids, mask), embedded(dense, ids, mask)))
            task.advance(len(ids))
    cosines = torch.cat(found)
    tokens = sum(map(len, texts.ids))
    return EvalResult(
        embedding_cosine=float(cosines.mean()),
        embedding_cosine_min=float(cosines.min()),
        texts=len(cosines),
        tokens=tokens,
    )
