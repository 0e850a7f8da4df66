"""Choose blocks by the alternating direction method of multipliers: ALPS (Meng et al. 2024, arXiv 2406.07831).

Symbols are the paper's: W a weight near the dense one, D its copy that has only so many blocks, V the multiplier that
draws them together, rho how strongly; H the inputs' Hessian, scaled to a diagonal of ones.  A round is::

    W <- (H W_dense - V + rho D) (H + rho I)^-1
    D <- the largest blocks of W + V / rho
    V <- V + rho (W - D)

rho grows until D's blocks stay.  The paper takes H apart once, into eigenvectors; here (H + rho I)^-1 is made for each
rho.  That is no more work (a round then has one product where eigenvectors need two), and its bits do not depend on the
number of threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.parts import TILE_ROWS
from compressor.numerics.products.deterministic import inverse_cholesky, quadratic
from compressor.numerics.range_search import Work
from compressor.numerics.sparsity.block_sparsity import (
    COLUMNS,
    best_blocks,
    block_mask,
    dampened_factor,
    of_tiles,
    refitted,
)

RHO, GROWTH, ROUNDS, MOST = 0.03, 1.3, 3, 60
"""The first rho, what it is multiplied by, rounds with each, and the most values of it."""


def alps_blocks(
    weight: Tensor, hessian: Tensor, start: Tensor, damp: float, *, refit: bool = True, blocks: ColumnBlocks = COLUMNS
) -> Tensor:
    """Return the columns that each tile keeps, rising: those that ADMM ends with, or the start's where they do better.

    Args:
        weight: float [out, in].
        hessian: float32 [in, in].
        start: int64 [tiles, kept], columns to begin with.
        damp: fraction of the Hessian's mean diagonal added to the diagonal.
        refit: whether what a tile keeps is refitted, before ends and starts are compared.
        blocks: of which shape.
    """
    W, tiles = weight.double(), blocks.tiles  # of a row of blocks
    found = admm_blocks(W, hessian, start, damp, blocks)
    kept = start.clone()
    for number, rows in enumerate(torch.split(W, TILE_ROWS * tiles)):
        here = slice(number * tiles, (number + 1) * tiles)
        if not torch.equal(found[here], start[here]):
            losses = [_loss(rows, hessian.double(), columns[here][0], damp, refit) for columns in (start, found)]
            kept[here] = found[here] if losses[1] < losses[0] else start[here]
    return kept


def admm_blocks(W: Tensor, hessian: Tensor, start: Tensor, damp: float, blocks: ColumnBlocks = COLUMNS) -> Tensor:
    """Return the columns of each tile that ADMM ends with: int64 [tiles, kept].

    Args:
        W: float64 [out, in].
    """
    count, columns = start.shape[1], W.shape[1]

    def project(size: Tensor) -> Tensor:
        return block_mask(best_blocks(of_tiles(size), count, blocks), len(W), columns)

    kept = admm_masks(W, hessian, block_mask(start, len(W), columns), damp, project)
    return best_blocks((of_tiles(kept.double()) > 0).double(), count, blocks)


def admm_masks(W: Tensor, hessian: Tensor, start: Tensor, damp: float, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the weights that ADMM ends with: bool [out, in].

    Args:
        W: float64 [out, in].
        start: bool [out, in], weights to begin with.
        project: squares [out, in] -> the weights with the largest, as many as may stay, bool.
    """
    H, scale = unit_diagonal(hessian, damp)
    dense = W * scale
    target = dense @ H
    D, V, kept, rho = dense * start, torch.zeros_like(dense), start, RHO
    for _ in range(MOST):
        inverse, before = _inverse(H, rho), kept
        for _ in range(ROUNDS):
            near = (target - V + rho * D) @ inverse
            D = near + V / rho
            kept = project(D.square())
            D *= kept
            V += rho * (near - D)
        if torch.equal(before, kept):
            break
        rho *= GROWTH
    return kept


def unit_diagonal(hessian: Tensor, damp: float) -> tuple[Tensor, Tensor]:
    """Return the dampened Hessian with a diagonal of ones, float64, and what columns of a weight are multiplied by."""
    H = hessian.double()
    diagonal = torch.diagonal(H)
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    scale = (diagonal.masked_fill(dead, mean) + damp * mean).sqrt()
    H = H / scale / scale[:, None]
    H.fill_diagonal_(1.0)
    return H, scale


def _inverse(H: Tensor, rho: float) -> Tensor:
    """Return (H + rho I)^-1."""
    raised = H.clone()
    raised.diagonal().add_(rho)
    R = inverse_cholesky(raised)
    if R is None:
        raise CompressorError("the Hessian is not positive definite")
    return R.t() @ R


def _loss(rows: Tensor, H: Tensor, columns: Tensor, damp: float, refit: bool) -> float:
    """Return tr((W - D) H (W - D)^T) of a tile that keeps some columns."""
    change = rows.clone()
    kept = rows[:, columns]
    if refit:
        kept = refitted(rows, H, columns, dampened_factor(H[columns][:, columns], damp)[0])
    change[:, columns] -= kept
    return float(quadratic(change, H))


def alps_work(rows: int, columns: int, kept: int) -> Work:
    """Return the work of :func:`alps_blocks` where it takes half of the values of rho, and all tiles change."""
    tries, tiles = MOST // 2, -(-rows // TILE_ROWS)
    return Counter(
        {
            "factor64_flop": 4 / 3 * (tries * columns**3 + 2 * tiles * kept**3),
            "matmul64_flop": 2 * tries * columns * (columns**2 + ROUNDS * rows * columns) + 4 * rows * columns**2,
            "stream_byte": 8 * (tries * (3 * columns**2 + ROUNDS * 12 * rows * columns) + 8 * tiles * kept**2),
        }
    )
