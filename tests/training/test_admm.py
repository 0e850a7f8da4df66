"""ADMM: against a dense reference in float64, exact projections, and what it has to find where that is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressor.numerics.sparsity.block_sparsity import of_tiles
from compressor.training.zeros.admm import ProjectedBlocks

ROWS, COLUMNS, KEPT, STEPS, EVERY, PENALTY = 32, 24, 6, 90, 5, 2.0


def quadratic(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a float64 [out, in] and positive definite Q [in, in] of f(w) = tr((w - a) Q (w - a)^T) / 2."""
    a = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    factor = torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64)
    return a, factor @ factor.t() / COLUMNS + 0.1 * torch.eye(COLUMNS)


def project(values: Tensor, step: int = STEPS) -> Tensor:
    """Keep the largest blocks of each tile, by a full sort: as many as the cubic schedule leaves."""
    sizes = values.square().view(-1, 16, COLUMNS).sum(1)
    count = KEPT + math.floor((COLUMNS - KEPT) * max(0.0, 1 - step / math.ceil(2 * STEPS / 3)) ** 3)
    return values * (sizes >= sizes.sort(dim=1).values[:, -count, None]).repeat_interleave(16, 0)


def rate(step: int) -> float:
    return 0.2 * (1 - step / STEPS)


def train(a: Tensor, Q: Tensor, moments: Tensor | None = None) -> tuple[ProjectedBlocks, Tensor]:
    """Run gradient descent under the masks, float32."""
    weights = {"w": a.float().clone()}
    moments = torch.ones(COLUMNS) if moments is None else moments
    masks = ProjectedBlocks(weights, {"w": KEPT}, {"w": moments}, STEPS, rate, PENALTY, EVERY)
    for step in range(STEPS):
        weights["w"].grad = ((weights["w"].double() - a) @ Q).float()
        masks.before_step(weights)
        weights["w"] -= rate(step) * weights["w"].grad
        masks.after_step(step + 1, weights)
    return masks, weights["w"]


def test_it_is_dense_admm() -> None:
    a, Q = quadratic(torch.Generator().manual_seed(0))
    w, y, z, last = a.clone(), torch.zeros_like(a), a.clone(), math.ceil(2 * STEPS / 3)
    for step in range(1, last + 1):
        rho = PENALTY / float(a.square().mean().sqrt()) * step / last
        w = w - rate(step - 1) * (w - a) @ Q
        w = w - rate(step - 1) * (rho * (w - z) + y) / (1 + rate(step - 1) * rho)
        if step % EVERY == 0:
            z = project(w + y / rho, step)
            y = y + rho * (w - z)
    w = w * (z != 0)
    for step in range(last, STEPS):
        w = w - rate(step) * (w - a) @ Q * (z != 0)
    masks, found = train(a, Q)
    torch.testing.assert_close(masks.target["w"].double(), z, rtol=0, atol=1e-5)
    torch.testing.assert_close(masks.dual["w"].double(), y, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.double(), w, rtol=0, atol=1e-5)


def test_it_ends_below_pruning_at_once() -> None:
    """The least losses on the blocks that ADMM finds are below those on the largest blocks: most, and in all."""
    losses = []
    for seed in range(10):
        a, Q = quadratic(torch.Generator().manual_seed(seed))

        def least(kept: Tensor, a: Tensor = a, Q: Tensor = Q) -> float:
            loss = 0.0
            for rows, columns in zip(a.split(16), kept, strict=True):
                rest = rows.clone()
                rest[:, columns] = 0.0
                solution = rest @ Q[:, columns] @ torch.linalg.inv(Q[columns][:, columns])
                rest[:, columns] = -solution
                loss += float((rest @ Q * rest).sum())
            return loss

        _, found = train(a, Q)
        left = of_tiles(found.abs()) > 0
        assert left.sum(1).tolist() == [KEPT] * (ROWS // 16)
        losses.append((least(left), least(of_tiles(project(a).abs()) > 0)))
    assert sum(found < at_once for found, at_once in losses) >= 8
    assert sum(found for found, _ in losses) < 0.95 * sum(at_once for _, at_once in losses)


def test_projections_are_the_nearest_of_the_pattern() -> None:
    a, Q = quadratic(torch.Generator().manual_seed(1))
    moments = torch.rand(COLUMNS, generator=torch.Generator().manual_seed(2)) + 0.1
    masks, found = train(a, Q, moments)
    for values in (masks.target["w"], found):
        assert (of_tiles(values.abs()) > 0).sum(1).tolist() == [KEPT] * (ROWS // 16)
    assert torch.equal(found != 0, masks.target["w"] != 0), "zeros stay"
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    nearest = masks.project("w", values, STEPS)
    assert torch.equal(nearest[nearest != 0], values[nearest != 0])
    sizes = of_tiles(values.square() * moments)
    expected = sizes.topk(KEPT, dim=1).values.sum()
    torch.testing.assert_close((nearest.square() * moments).sum(), expected, rtol=1e-6, atol=0)
