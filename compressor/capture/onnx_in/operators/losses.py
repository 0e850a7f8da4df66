"""Losses, as models that were exported with them compute them."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call


@operator("NegativeLogLikelihoodLoss")
def nll_loss(call: Call) -> Tensor:
    """Return the weighted negative log likelihood of classes [N, d...] under [N, C, d...]."""
    return _likelihood(call, call.tensor(0), call.tensor(1), call.maybe(2))


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Return the loss of scores, and their log likelihoods."""
    logs = torch.log_softmax(call.tensor(0), 1)
    loss = _likelihood(call, logs, call.tensor(1), call.maybe(2))
    return (loss, logs) if call.outputs > 1 else loss


def _likelihood(call: Call, logs: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    ignored = call.get("ignore_index")
    classes = labels.to(torch.int64)
    kept = torch.ones_like(classes, dtype=torch.bool) if ignored is None else classes != ignored
    safe = torch.where(kept, classes, torch.zeros_like(classes))
    loss = -torch.gather(logs, 1, safe.unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(loss) if weight is None else weight[safe]
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    loss = torch.where(kept, loss * weights, torch.zeros_like(loss))
    how = call.get("reduction", "mean")
    if how == "none":
        return loss
    return torch.sum(loss) if how == "sum" else torch.sum(loss) / torch.sum(weights)
