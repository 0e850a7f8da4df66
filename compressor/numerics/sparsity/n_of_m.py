"""Choose N of every M weights of a row to keep, and round them while later columns make up for all errors.

Symbols: W the weight [out, in], H = 2 / n X^T X of its inputs, R upper with (H + D)^-1 = R^T R.  SparseGPT (Frantar and
Alistarh 2023, arXiv 2301.00774, algorithm 1) goes through the columns: what a column loses, because it is left out or
rounded, the later ones make up for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, leave_out_of_groups, pack, unpack
from compressor.numerics.grids import grid_values, round_to_grid
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.range_search import search_grid
from compressor.numerics.sparsity.alps import admm_masks

_BLOCK = 128  # columns whose errors go to one another one by one


def largest_of_groups(size: Tensor, pattern: KeptOfGroup) -> Tensor:
    """Return where the N largest of every M neighbours are: [out, in] -> bool; of equal ones the first."""
    grouped = size.reshape(len(size), -1, pattern.size)
    order = grouped.argsort(dim=-1, descending=True, stable=True)[..., : pattern.kept]
    return torch.zeros_like(grouped, dtype=torch.bool).scatter(-1, order, True).flatten(1)


def largest_entries(weight: Tensor, hessian: Tensor | None, pattern: KeptOfGroup) -> Tensor:
    """Return where the N largest of every M are, bool [out, in]: of W^2, or of W^2 diag(H) where H is given."""
    size = weight.double().square()
    return largest_of_groups(size if hessian is None else size * torch.diagonal(hessian).double(), pattern)


def left_entries(weight: Tensor, pattern: KeptOfGroup) -> Tensor | None:
    """Return N of every M with all that are not zero, bool [out, in]; None if a group has more."""
    is_left = weight != 0
    most = int(is_left.view(len(weight), -1, pattern.size).sum(-1).max())
    return largest_of_groups(is_left.float(), pattern) if most <= pattern.kept else None


def surgeon_entries(weight: Tensor, R: Tensor, pattern: KeptOfGroup) -> Tensor:
    """Return what SparseGPT keeps, bool [out, in]: of each group the N with the largest W^2 / diag(R)^2, once the
    columns in front of the group have been left out.
    """
    kept = torch.zeros(weight.shape, dtype=torch.bool)

    def choose(W: Tensor, i: int) -> Tensor:
        if i % pattern.size == 0:
            columns = slice(i, i + pattern.size)
            loss = (W[columns] / torch.diagonal(R)[columns, None]).t().square()
            kept[:, columns] = largest_of_groups(loss, pattern)
        return W[i] * kept[:, i]

    _sweep(weight.double(), R, pattern.size, choose)
    return kept


def alps_entries(
    weight: Tensor, hessian: Tensor, R: Tensor, pattern: KeptOfGroup, damp: float, *, refit: bool = True
) -> Tensor:
    """Return what ADMM keeps, bool [out, in], or for rows where it loses more, what it began with: SparseGPT's."""
    W, H = weight.double(), hessian.double()
    start = surgeon_entries(weight, R, pattern)
    found = admm_masks(W, hessian, start, damp, lambda size: largest_of_groups(size, pattern))
    losses = [_row_losses(W - only_kept_entries(W, R, H, kept, refit=refit), H) for kept in (start, found)]
    return torch.where((losses[1] < losses[0])[:, None], found, start)


def only_kept_entries(W: Tensor, R: Tensor, H: Tensor, kept: Tensor, *, refit: bool) -> Tensor:
    """Return the weight with zeros where it is not kept, float64 [out, in]; refitted where that loses less in a row.

    Args:
        W, R, H: float64.
        kept: bool [out, in].
    """
    plain = W * kept
    if not refit:
        return plain
    swept = _sweep(W, R, 1, lambda W, i: W[i] * kept[:, i])
    is_less = _row_losses(W - swept, H) < _row_losses(W - plain, H)
    return torch.where(is_less[:, None], swept, plain)


def round_entries(
    weight: Tensor, hessian: Tensor, R: Tensor, kept: Tensor, fmt: Format, *, refit: bool = True
) -> PackedWeight:
    """Store what is kept, rounded in the sweep that leaves out the rest, or to the nearest where that loses less.

    Scales are fitted to the weights that are kept, as they are once the others have been made up for.

    Args:
        weight, hessian: float [out, in] and [in, in].
        R: float64 [in, in].
        kept: bool [out, in], N of every M.
        fmt: that stores N of every M.
        refit: whether others make up for what is left out; they always do for what rounding loses.
    """
    pattern = fmt.extra(KeptOfGroup)
    assert pattern is not None
    W, H, plain = weight.double(), hessian.double(), fmt.of_kept
    target = only_kept_entries(W, R, H, kept, refit=refit)
    order = (~kept).long().argsort(dim=1, stable=True)[:, : fmt.stored_columns(W.shape[1])]  # columns kept, rising
    start = rtn_quantize(target.gather(1, order).float(), plain, lambda group, _: _search(group, plain))
    _, scales, _ = unpack(start)  # [out, groups]
    codes = torch.zeros(W.shape, dtype=torch.uint8)
    size = plain.columns(order.shape[1])

    def choose(W: Tensor, i: int) -> Tensor:
        scale = scales[:, i // pattern.size * pattern.kept // size]
        code = round_to_grid(W[i, :, None], scale, None, plain)
        codes[:, i] = code[:, 0]
        return grid_values(code, scale, None, plain)[:, 0] * kept[:, i]

    _sweep(W if refit else target, R, 1, choose)
    swept = pack(codes.gather(1, order), scales, None, plain)
    found = [leave_out_of_groups(one, kept, pattern) for one in (start, swept)]
    losses = [float(quadratic(W - dequantize(one), H)) for one in found]
    return found[1] if losses[1] < losses[0] else found[0]


def _search(group: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Search grids with all columns alike: rows keep different ones."""
    return search_grid(group, torch.ones(group.shape[1]), fmt)


def _sweep(weight: Tensor, R: Tensor, multiple: int, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Go through the columns, and let later ones make up for what each loses; return the columns as they ended.

    Args:
        weight: float64 [out, in].
        multiple: blocks of columns are multiples of this, so that all columns of a group are up to date.
        choose: (W float64 [in, out] so far, column) -> what the column becomes, [out].
    """
    W, found, block = weight.t().contiguous(), torch.empty_like(weight.t()), _BLOCK // multiple * multiple
    for first in range(0, len(W), block):
        last = min(first + block, len(W))
        errors = torch.empty(last - first, W.shape[1], dtype=W.dtype)
        for i in range(first, last):
            found[i] = choose(W, i)
            errors[i - first] = (W[i] - found[i]) / R[i, i]
            W[i:last].addmm_(R[i, i:last, None], errors[i - first][None], alpha=-1)
        W[last:].addmm_(R[first:last, last:].t(), errors, alpha=-1)
    return found.t()


def _row_losses(change: Tensor, H: Tensor) -> Tensor:
    """Return the loss of each row, diag(D H D^T), float64 [out]."""
    return ((change @ H) * change).sum(1)
