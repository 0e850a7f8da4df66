"""Train a small model to predict a prompt's caches: how predictors begin, the loss, what text costs behind the prompt.

A sample's first half is the prompt, whose keys and values are predicted; the model itself reads the rest behind these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.kept_tokens.predicted_caches import prediction
from compressor.graph.kinds.draft_heads import without_heads
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.products.deterministic import inverse_cholesky, total
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.losses import divergence, hidden_error
from compressor.training.trainable import Outputs, Reader, TrainableGraph

_BEGINS_WITH, _DAMPING = 16, 1e-4  # samples of the least squares, and the share of their mean square that is added


@torch.no_grad()
def begin_predictors(graph: GraphModule, names: Sequence[str], makers: Sequence[Node], ids: Tensor) -> None:
    """Let predictors be the ridge regression of what the layers' own linears make on what the copies' make.

    Args:
        names: of the predictors' weights, on the meta device.
        makers: the layers' linears, in the same order.
        ids: samples, int64 [n, S].
    """
    types = {name: graph.get_parameter(name).dtype for name in names}
    for name in names:
        set_parameter(graph, name, torch.zeros(graph.get_parameter(name).shape, dtype=types[name]))
    read = next(site.input for site in linear_sites(graph) if site.weight_name == names[0])
    x, *wanted = (value.double().flatten(0, -2) for value in _values(graph, [read, *makers], ids[:_BEGINS_WITH]))
    square = x.t() @ x
    damping = _DAMPING * float(square.diagonal().mean()) + torch.finfo(torch.float32).tiny
    R = inverse_cholesky(square + damping * torch.eye(len(square), dtype=torch.float64))
    assert R is not None  # the damping makes it positive definite
    for name, y in zip(names, wanted, strict=True):
        set_parameter(graph, name, (R.t() @ (R @ (x.t() @ y))).t().contiguous().to(types[name]))


def _values(graph: GraphModule, points: Sequence[Node], ids: Tensor) -> Sequence[Tensor]:
    return TrainableGraph(graph, (), points)(ids).hidden


def rows_of(graph: GraphModule) -> list[Node]:
    """Return the nodes of predicted rows, and of the new keys and values that they are to be."""
    results = cast("tuple[Node, ...]", graph.graph.output_node().args[0])
    return [prediction(graph), *results[1:-1]]


def continued(plain: GraphModule, ids: Tensor, rows: Sequence[Tensor], device: Device) -> Tensor:
    """Return the model's logits float32 [B, R, V] of a sample's last R tokens behind the caches of the others.

    Args:
        plain: the graph without predictions.
        ids: int64 [B, S].
        rows: keys of each layer, then values, float32 [B, Hkv, S - R, D].
    """
    prompt = rows[0].shape[2]
    position = torch.arange(prompt, ids.shape[1])
    keep = torch.arange(ids.shape[1] - prompt)
    inputs: list[Any] = [device.of(tensor) for tensor in (ids[:, prompt:], position, keep)]
    logits, *_ = Reader(plain, {}, (), device).run(*inputs, *rows, enable_io_processing=False)
    return cast(Tensor, logits)


def prompts_loss(graph: GraphModule, temperature: float, caches: float, device: Device) -> Objective:
    """Return the loss of predictions: KL(model || model behind predicted caches), and the error of these.

    Horton et al. 2024 add the mean absolute error of the caches to the next tokens' losses; here the model's own
    predictions are learnt, and the error is relative to the size of the rows, so that a weight means the same anywhere.

    Args:
        graph: with predictions; the points of what is trained are :func:`rows_of`.
        temperature: logits are divided by it.
        caches: weight of the predicted rows' error.
    """
    plain = without_heads(graph)

    def objective(batch: Tensor, outputs: Outputs, _step: int) -> Tensor:
        prompt = batch.shape[1] // 2
        stacked, *wanted = outputs.hidden
        rows = [each[:, :, :prompt] for each in stacked.unbind(0)]
        logits = continued(plain, batch, rows, device)
        loss = divergence(logits, outputs.last[:, prompt:].detach(), temperature)
        return loss + caches * hidden_error(list(stacked.unbind(0)), [each.detach() for each in wanted])

    return objective


@dataclass(frozen=True)
class BehindPrompts:
    """Say what predicted caches cost the text behind prompts.

    Attributes:
        prompt: tokens of each.
        dense, predicted: perplexity of the tokens there.
        agreement: share of the tokens there at which the likeliest next one is the model's own.
    """

    prompt: int
    dense: float
    predicted: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"lossy: behind prompts of {self.prompt} tokens, perplexity {self.predicted:.4g} in place of "
            f"{self.dense:.4g}, and the model's likeliest token in {self.agreement:.1%}"
        )


@torch.no_grad()
def measure_prompts(graph: GraphModule, samples: Tensor, batch: int) -> BehindPrompts:
    """Measure a graph with predictions on the second halves of samples, int64 [n, S]."""
    model, plain, device = TrainableGraph(graph, (), rows_of(graph)[:1]), without_heads(graph), Device()
    losses, same, count = [0.0, 0.0], 0, 0
    for part in torch.split(samples, batch):
        outputs, prompt = model(part), part.shape[1] // 2
        rows = [each[:, :, :prompt] for each in outputs.hidden[0].unbind(0)]
        found = outputs.last[:, prompt:], continued(plain, part, rows, device)
        for which, logits in enumerate(found):
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, part[:, prompt + 1 :, None])
            losses[which] -= float(total(chosen.double()))
        same += int((found[0].argmax(-1) == found[1].argmax(-1)).sum())
        count += found[0][..., 0].numel()
    dense, predicted = (math.exp(loss / (count - len(samples))) for loss in losses)
    return BehindPrompts(samples.shape[1] // 2, dense, predicted, same / count)
