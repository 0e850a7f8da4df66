"""Rows of a linear's inputs weighted by how far the model's confident predictions move when its outputs there do.

After LiDAR-PTQ's task-guided global positive loss (Zhou et al. 2024, arXiv 2401.15865, section 3.2), which adds to the
local reconstruction loss one of the final predictions, on the positives of the full-precision model only.  Here:

- a positive is a token, or an image, whose likeliest prediction has a probability of at least :data:`CONFIDENT`;
- the loss is the sum over positives of KL(dense || quantised).  To second order in the change d of the logits it is
  d^T F d / 2, with F = diag(p) - p p^T;
- a linear's outputs y_t, t a row, move the logits by their Jacobian J_t.  Of the sum over t and s of dy_t^T J_t^T F J_s
  dy_s, what is kept is the sum over t of w_t |dy_t|^2, with w_t = tr(J_t^T F J_t): errors of different rows, and of
  different outputs, are taken to be uncorrelated;
- F = B B^T with B = (I - p 1^T) diag(sqrt p), so for signs e by chance, w_t is the expectation of |J_t^T B e|^2: one
  run backwards from B e at each positive (Hutchinson 1989), with all rows of all linears as by-products.

A linear's loss is then the sum over t of (1 + w_t / mean w) / 2 * |(W - Q) x_t|^2: the local one and the guided one,
half each.  It is tr((W - Q) H (W - Q)^T) with weighted rows in H, so whatever minimises that minimises this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.gradients import backwards
from compressor.calibration.segment_runner import split_samples
from compressor.errors import UsageError
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.graph.model import ModelInfo
from compressor.graph.sites import Site, group_by_input
from compressor.host.tensor_files import Spill
from compressor.numerics.products.deterministic import total

CONFIDENT = 0.1
"""The least probability of a positive's likeliest prediction."""
_PIXELS = 1 << 14  # of the images that run at once; of text, it is one sample


def guided_rows(
    graph: GraphModule, ids: SampleInputs, sites: Sequence[Site], seed: int, spill: Spill | None = None
) -> dict[str, Tensor]:
    """Return a weight for each row of each site's input, float32 [rows] of mean 1; sites that share an input share it.

    Peak memory: as :func:`compressor.calibration.gradients.backwards` takes it, and the weights.

    Args:
        ids: as for :class:`compressor.calibration.calibrate.CalibrationRun`.
        seed: of the signs.
    Raises:
        UsageError: the model predicts no classes.
    """
    info: ModelInfo = graph.meta["model"]
    batches = split_samples(graph, ids, _PIXELS if info.kind == "module" else 1)
    squares: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    generator = torch.Generator().manual_seed(seed)

    def loss(_: int, logits: Tensor) -> Tensor:
        if info.kind == "encoder" or (info.kind == "module" and logits.dim() != 2):
            raise UsageError(
                f"{info.name}: task_guided looks at predictions: it needs a decoder, or a module that gives one row of "
                "classes an image; switch it off"
            )
        signs = torch.randint(2, logits.shape, generator=generator) * 2 - 1
        return (positive_slopes(logits.detach(), signs) * logits).sum()

    def add(site: Site, _: int, gradient: Tensor) -> None:
        squares[site.name].append(gradient.reshape(-1, site.out_features).square().sum(1))

    for _ in backwards(graph, batches, sites, "output", loss, add, spill):
        pass
    found: dict[str, Tensor] = {}
    for group in group_by_input(sites):
        weights = torch.stack([torch.cat(squares.pop(site.name)) for site in group]).sum(0)
        found |= {site.name: half_guided(weights) for site in group}
    return found


def positive_slopes(logits: Tensor, signs: Tensor) -> Tensor:
    """B e at positives, and zeros elsewhere.

    Args:
        logits: float [..., classes].
        signs: e, of the same shape; 1 or -1.
    """
    p = torch.softmax(logits, dim=-1)
    spread = p.sqrt() * signs
    slopes = spread - p * spread.sum(-1, keepdim=True)
    return slopes * (p.amax(-1, keepdim=True) >= CONFIDENT)


def half_guided(weights: Tensor) -> Tensor:
    """(1 + w / mean w) / 2; ones where no row matters."""
    mean = total(weights.double()) / len(weights)
    return (0.5 + 0.5 * weights.double() / mean).float() if float(mean) > 0 else torch.ones_like(weights)
