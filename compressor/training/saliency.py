"""Estimate to first order how the loss changes without a column of a weight: weights times gradients.

Taylor importance (Molchanov et al. 2019, arXiv 1906.10771, section 3.1) of a channel that linears W_1 ... W_r read in
columns K is the mean over samples of (sum_i sum_{k in K} sum_o W_i[o, k] dL/dW_i[o, k])^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy

from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.graph.sites import Site
from compressor.pipeline.context import Context
from compressor.pipeline.structured.widths import Widths, score_channels, squares_of
from compressor.training.objectives.losses import next_token_loss
from compressor.training.trainable import TrainableGraph

ChannelImportance: TypeAlias = Literal["activation", "magnitude", "taylor"]
"""Rank channels by the size of their contribution, by the weights that read them, or by the change of the loss."""

SALIENCY_SAMPLES = 64  # at most: a rank needs fewer than a Hessian


def check_saliency(pass_name: str, graph: GraphModule) -> None:
    """Refuse a model without a loss of its own.

    Raises:
        UsageError: the model predicts neither next tokens nor one of several classes.
    """
    info: ModelInfo = graph.meta["model"]
    value = next(iter(graph.graph.output_node().all_input_nodes)).meta.get("val")
    is_classes = info.kind == "module" and isinstance(value, Tensor) and value.dim() == 2
    if info.hears or info.pair is not None or not (info.generates or is_classes):
        raise UsageError(
            f"{pass_name}: importance taylor needs gradients of a loss, and {info.name} predicts neither next tokens "
            "nor one of several classes; take `activation` or `magnitude`"
        )


def column_saliency(pass_name: str, graph: GraphModule, ctx: Context, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Run samples forwards and backwards; return by site sum_o W[o, k] dL/dW[o, k], float64 [samples, in].

    Samples run one at a time.  L is the loss of the next tokens; of classes, that of the class that the
    model predicts, so no labels are needed.
    """
    samples = ctx.calibration(pass_name)
    assert isinstance(samples.ids, Tensor)  # `check_saliency` refuses models whose samples are not
    names = list(dict.fromkeys(site.weight_name for site in sites))
    model, rows = TrainableGraph(graph, names), samples.ids[:SALIENCY_SAMPLES]
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    with ctx.reporter.task(pass_name, len(rows)) as task:
        for row in torch.split(rows, 1):
            logits = model(row).last
            is_text = model.info.generates
            loss = next_token_loss(logits, row) if is_text else cross_entropy(logits, logits.detach().argmax(-1))
            gradients = torch.autograd.grad(loss, [model.weights[name] for name in names])
            for name, gradient in zip(names, gradients, strict=True):
                found[name].append((gradient.double() * model.weights[name].detach().double()).sum(0).cpu())
            task.advance(1)
    return {site.name: torch.stack(found[site.weight_name]) for site in sites}


def channel_scores(
    pass_name: str, graph: GraphModule, ctx: Context, widths: Widths, importance: ChannelImportance
) -> list[Tensor]:
    """Return each channel's importance, comparable across families, float64 [channels]."""
    if importance == "taylor":
        sites = {site.name: site for readers in widths.readers for site in readers}
        return widths.losses(column_saliency(pass_name, graph, ctx, list(sites.values())))
    return score_channels(
        graph, widths, squares_of(graph, ctx, pass_name, widths) if importance == "activation" else None
    )
