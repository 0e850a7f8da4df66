"""Train heads that draft: how they begin, how far from the model's predictions theirs are, how often they agree.

Logits of token t say what comes at t + 1.  Head i, which knows the token at t + 1, says what comes at t + 1 + i: what
the model says at t + i, where it reads the text as it went on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import linear_sites
from compressor.numerics.products.deterministic import total
from compressor.training.objectives.losses import divergence
from compressor.training.trainable import TrainableGraph


@torch.no_grad()
def begin_heads(graph: GraphModule, names: Sequence[str], ids: Tensor, seed: int) -> None:
    """Let new heads hold all tokens for as likely, with random directions to learn from.

    These are as large for the hidden state as for the table's rows, so that heads see both.

    Args:
        names: of the heads' weights, the first one that of the linear which reads both; all are on the meta device.
        ids: samples, int64 [n, S].
        seed: of the directions.
    """
    types = {name: graph.get_parameter(name).dtype for name in names}
    for name in names:
        set_parameter(graph, name, torch.zeros(graph.get_parameter(name).shape, dtype=types[name]))
    up = next(site for site in linear_sites(graph) if site.weight_name == names[0])
    (pair,) = TrainableGraph(graph, (), [up.input])(ids[:1]).hidden
    weight = torch.randn(up.out_features, up.in_features, generator=torch.Generator().manual_seed(seed))
    for half, x in zip(weight.chunk(2, 1), pair.float().chunk(2, -1), strict=True):
        half /= (up.in_features * total(x.square()) / x.numel()).sqrt().clamp_min(1e-6)
    set_parameter(graph, names[0], weight.to(types[names[0]]))


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
