"""Choose blocks of 16 rows by one column to leave out, refit the others, and round them.

Symbols: W the weight [out, in], H = 2 / n X^T X of its inputs, R upper with (H + D)^-1 = R^T R, S the columns that a
tile of 16 rows keeps.  The loss is tr((W - Q) H (W - Q)^T).  For one tile, with W' the least squares solution on S, it
is that of W' plus tr((W' - Q_S) H_SS (W' - Q_S)^T): rounding the columns that are kept by GPTQ on H_SS is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.errors import CompressorError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.layouts.columns import of_blocks
from compressor.formats.packing import PackedWeight, dequantize, leave_out
from compressor.formats.parts import TILE_ROWS, TILED
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import column_blocks, raised_factor, sweep
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.range_search import chooser

Importance: TypeAlias = Literal["magnitude", "activation"]
"""A block's size: its weights alone, or its contribution to the outputs (Sun et al. 2023, Wanda, arXiv 2306.11695)."""

_MOST_DAMPENING = 100.0
COLUMNS = ColumnBlocks(50)
"""Blocks of 16 rows by one column, the smallest; how many are left out does not matter here."""


def of_tiles(values: Tensor) -> Tensor:
    """Add up what the 16 rows of each tile have: [out, in] -> [tiles, in]; the last tile may have fewer."""
    filled = pad(values, (0, 0, 0, -len(values) % TILE_ROWS))
    return filled.view(-1, TILE_ROWS, values.shape[1]).sum(1)


def largest_blocks(weight: Tensor, hessian: Tensor | None, count: int, blocks: ColumnBlocks = COLUMNS) -> Tensor:
    """Return the columns of each tile with the largest blocks, rising: int64 [tiles, count].

    Args:
        weight: float [out, in].
        hessian: float [in, in], or its diagonal [in]; where it is given, a block's size is W^2 diag(H), the size of its
            contribution.
        count: columns to keep.
        blocks: of which shape; their width divides both.
    """
    size = weight.double().square()
    if hessian is not None:
        size = size * (hessian if hessian.dim() == 1 else torch.diagonal(hessian)).double()
    return best_blocks(of_tiles(size), count, blocks)


def outliers(weight: Tensor, squares: Tensor, factor: float) -> int:
    """Count the weights whose contribution |w| ||x|| is more than so many means of it (Yin et al. 2023, OWL, arXiv
    2310.05175, section 3.2).

    Args:
        weight: float [out, in].
        squares: mean squares of the inputs, float [in].
    """
    size = weight.double().abs() * squares.double().sqrt()
    return int((size > factor * size.mean()).sum())


def without_dead(weight: Tensor, hessian: Tensor) -> Tensor:
    """Return the weight with zeros where the inputs are zero in all samples: blocks there cost nothing to leave out."""
    return weight.masked_fill(torch.diagonal(hessian) <= 0, 0.0)


def largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the largest values of each row, rising; of equal ones the first."""
    return torch.argsort(values, dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def block_mask(kept: Tensor, rows: int, columns: int) -> Tensor:
    """Return which entries of a weight the kept blocks hold: bool [rows, columns]."""
    tiles = torch.zeros(len(kept), columns, dtype=torch.bool, device=kept.device).scatter_(1, kept, True)
    return tiles.repeat_interleave(TILE_ROWS, dim=0)[:rows]


def surgeon_blocks(
    weight: Tensor, R: Tensor, count: int, blocksize: int = 128, blocks: ColumnBlocks = COLUMNS
) -> Tensor:
    """Return the columns of each tile that SparseGPT keeps, rising: int64 [tiles, count].

    Columns are gone through in blocks (Frantar and Alistarh 2023, arXiv 2301.00774, algorithm 1).  Where one begins,
    the columns whose loss W^2 / diag(R)^2 is smallest are given up, and later columns make up for them.  A loss is
    added up over the rows of a tile, and over the columns that go together.  How many of a block a tile gives up is not
    the same for all blocks, as it is there: it follows from the losses W^2 / [H^-1]_jj of the whole tile before any
    column is given up.

    Args:
        weight: float [out, in].
        R: float64 [in, in], upper, of the columns in their order.
        blocks: of which shape; their width divides ``count``, ``blocksize`` and the columns.
    """
    W, rows = weight.double().t().contiguous(), torch.arange(len(weight)) // (TILE_ROWS * blocks.tiles)
    width = blocks.width

    def losses(errors: Tensor) -> Tensor:
        return _by_block(of_tiles(errors.t().square()), blocks)

    alone = losses(W / R.square().sum(0)[:, None].sqrt())
    kept = torch.zeros_like(alone).scatter_(1, largest(alone, count // width), 1.0)
    for first in range(0, len(W), blocksize):
        last = min(first + blocksize, len(W))
        here = slice(first // width, last // width)
        quota = kept[:, here].sum(1, keepdim=True)
        loss = losses(W[first:last] / torch.diagonal(R)[first:last, None])
        rank = loss.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept[:, here] = (rank < quota).double()
        errors = torch.empty(last - first, len(weight), dtype=torch.float64)
        for i in range(first, last):
            errors[i - first] = W[i] * (1 - kept[rows, i // width]) / R[i, i]
            W[i:last] -= R[i, i:last, None] * errors[i - first]
        W[last:] -= R[first:last, last:].t() @ errors
    return _columns_of(largest(kept, count // width), blocks, -(-len(weight) // TILE_ROWS))


def best_blocks(sizes: Tensor, count: int, blocks: ColumnBlocks) -> Tensor:
    """Return the columns of the largest blocks for each tile, from float [tiles, in]: int64 [tiles, count]."""
    return _columns_of(largest(_by_block(sizes, blocks), count // blocks.width), blocks, len(sizes))


def _columns_of(chosen: Tensor, blocks: ColumnBlocks, tiles: int) -> Tensor:
    """Return the columns of each tile from the blocks of each row of blocks: int64 [tiles, columns]."""
    return of_blocks(chosen, blocks.width).repeat_interleave(blocks.tiles, dim=0)[:tiles]


def _by_block(sizes: Tensor, blocks: ColumnBlocks) -> Tensor:
    """Add up float [tiles, in] over blocks: [rows of blocks, columns of blocks]."""
    filled = pad(sizes, (0, 0, 0, -len(sizes) % blocks.tiles))
    shape = (len(filled) // blocks.tiles, blocks.tiles, sizes.shape[1] // blocks.width, blocks.width)
    return filled.view(shape).sum((1, 3))


def left_blocks(weight: Tensor, count: int, blocks: ColumnBlocks) -> Tensor | None:
    """Return so many columns of each tile with all that are not zero, rising: int64 [tiles, count]; None if a tile has
    more.

    Args:
        weight: float [out, in], pruned before.
        blocks: of which shape; their width divides both.
    """
    entries = of_tiles((weight != 0).double())
    most = int((_by_block(entries, blocks) > 0).sum(1).max())
    return None if most > count // blocks.width else best_blocks((entries > 0).double(), count, blocks)


def only_kept(
    weight: Tensor, hessian: Tensor, kept: Tensor, dampening_frac: float, *, refit: bool = True
) -> tuple[Tensor, float]:
    """Return the weight with all blocks but the kept ones at zero, float32 [out, in], and the most that a tile was
    dampened by.

    Args:
        weight, hessian, kept, refit: as for :func:`round_kept`.
    """
    found, most = torch.zeros(weight.shape, dtype=torch.float64), dampening_frac
    tiles = _tiles(weight, hessian.double(), kept, dampening_frac, refit)
    for into, columns, (W, _, _, damp) in zip(torch.split(found, TILE_ROWS), kept, tiles, strict=True):
        into[:, columns] = W
        most = max(most, damp)
    return found.float(), most


def _tiles(
    weight: Tensor, H: Tensor, kept: Tensor, dampening_frac: float, refit: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Yield each tile's kept columns W, refitted if asked for, their H and R, and the dampening that R took."""
    for rows, columns in zip(torch.split(weight.double(), TILE_ROWS), kept, strict=True):
        HS = H[columns][:, columns]
        R, damp = dampened_factor(HS, dampening_frac)
        yield refitted(rows, H, columns, R) if refit else rows[:, columns], HS, R, damp


def dampened_factor(H: Tensor, dampening_frac: float) -> tuple[Tensor, float]:
    """Return R of the columns in their order, and the dampening it took: ten times more as long as that fails.

    Raises:
        CompressorError: the Hessian is not positive definite, however much it is dampened.
    """
    if not bool(torch.isfinite(H).all()):
        raise CompressorError("the Hessian holds NaN or inf: the site's inputs overflow on these samples")
    dead = torch.diagonal(H) <= 0
    mean = float(torch.diagonal(H)[~dead].double().mean()) if not bool(dead.all()) else 1.0
    return raised_factor(H, dead, mean, dampening_frac, _MOST_DAMPENING)


def round_kept(
    weight: Tensor, hessian: Tensor, kept: Tensor, fmt: Format, dampening_frac: float, *, refit: bool = True
) -> tuple[PackedWeight, float]:
    """Store the columns that are kept, tile by tile: refitted to the outputs that all had, and rounded by GPTQ.

    A tile is rounded to the nearest where GPTQ has no smaller loss.  The most that a tile was dampened by is returned
    as well.

    Args:
        weight: float [out, in].
        hessian: float32 [in, in].
        kept: int64 [tiles, kept], rising.
        fmt: with blocks left out, as many as ``kept`` says.
    """
    blocks, in_features = fmt.extra(ColumnBlocks), weight.shape[1]
    assert blocks is not None
    pieces, most = [], dampening_frac
    for W, HS, R, damp in _tiles(weight, hessian.double(), kept, dampening_frac, refit):
        most = max(most, damp)
        pieces.append(round_columns(W, HS, R, fmt.of_kept))
    joined = {name: torch.cat([piece.parts[name] for piece in pieces]) for name in pieces[0].parts if name in TILED}
    stored = PackedWeight(joined, fmt.of_kept, (len(weight), kept.shape[1]))
    return leave_out(stored, kept, in_features, blocks), most


def refitted(W: Tensor, H: Tensor, columns: Tensor, R: Tensor) -> Tensor:
    """Return the least squares solution on some columns, or W where the dampening makes that worse: [out, kept].

    W' = W_S + W_rest H[rest, S] (H[S, S] + D)^-1: the dampening draws towards the weight, not towards zero.

    Args:
        W, H: float64 [out, in] and [in, in].
        R: of H[S, S].
    """
    rest = W.clone()
    rest[:, columns] = 0.0
    missed = rest @ H[:, columns]
    change = missed @ R.t() @ R
    # What it changes is smaller by 2 tr(change H[S, rest] W_rest^T) - tr(change H[S, S] change^T).
    gain = 2 * float((change * missed).sum()) - float(quadratic(change, H[columns][:, columns]))
    return W[:, columns] + change if gain > 0 else W[:, columns]


def round_columns(W: Tensor, H: Tensor, R: Tensor, fmt: Format) -> PackedWeight:
    """Round by GPTQ, columns in their order, or to the nearest where that has no larger loss.

    Args:
        W, H, R: float64 [rows, columns], the inputs' Hessian and its factor (:func:`dampened_factor`).
        fmt: one that leaves nothing out.
    """
    start = rtn_quantize(W.float(), fmt, chooser("mse", H.float(), fmt))
    columns = W.shape[1]
    blocks = list(column_blocks(columns, fmt.columns(columns), 128))
    swept, _ = sweep(W, R, start, torch.arange(columns), blocks, None, None)
    losses = [float(quadratic(W - dequantize(found), H)) for found in (start, swept)]
    return swept if losses[1] < losses[0] else start
