"""Choose single weights to keep, N of every M of a row or a share of all, and round them while later columns make up
for all errors.

Symbols: W the weight [out, in], H = 2 / n X^T X of its inputs, R upper with (H + D)^-1 = R^T R.  SparseGPT (Frantar and
Alistarh 2023, arXiv 2301.00774, algorithm 1) goes through the columns: what a column loses, because it is left out or
rounded, the later ones make up for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from compressor.formats.extras import KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import (
    PackedWeight,
    dequantize,
    leave_out_of_groups,
    leave_out_singles,
    pack,
    unpack,
)  # fmt: skip
from compressor.numerics.grids import grid_values, round_to_grid
from compressor.numerics.nearest import awq_quantize, rtn_quantize
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.range_search import search_grid
from compressor.numerics.sparsity.alps import admm_masks

_DAMPENING = 0.01  # of the inputs' mean square
_BLOCK = 128  # columns whose errors go to one another one by one

Pattern: TypeAlias = KeptOfGroup | SingleZeros
"""Pattern of single weights: N of every M of a row, or a share of the whole matrix."""


def pattern_of(fmt: Format) -> Pattern | None:
    """Return the pattern of single weights that a format leaves out; None of blocks, and where all are stored."""
    return fmt.extra(KeptOfGroup) or fmt.extra(SingleZeros)


def largest_allowed(size: Tensor, pattern: Pattern) -> Tensor:
    """Return where the largest are that a pattern allows: [out, in] -> bool; of equal ones the first."""
    if isinstance(pattern, KeptOfGroup):
        return largest_of_groups(size, pattern)
    return largest_of_all(size, pattern.kept(*size.shape))


def largest_of_all(size: Tensor, count: int) -> Tensor:
    """Return where the ``count`` largest are, bool of the same shape; of equal ones the first."""
    order = size.flatten().argsort(descending=True, stable=True)[:count]
    return torch.zeros(size.numel(), dtype=torch.bool, device=size.device).index_fill(0, order, True).view(size.shape)


def shares(count: int, sizes: list[int]) -> list[int]:
    """Share a count out by sizes, as whole numbers; what is left goes to the first ones."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    whole = [-(-count * end // ends[-1]) for end in ends]
    return [after - before for before, after in itertools.pairwise(whole)]


def largest_of_groups(size: Tensor, pattern: KeptOfGroup) -> Tensor:
    """Return where the N largest of every M neighbours are: [out, in] -> bool; of equal ones the first."""
    grouped = size.reshape(len(size), -1, pattern.size)
    order = grouped.argsort(dim=-1, descending=True, stable=True)[..., : pattern.kept]
    return torch.zeros_like(grouped, dtype=torch.bool).scatter(-1, order, True).flatten(1)


def largest_entries(weight: Tensor, hessian: Tensor | None, pattern: Pattern) -> Tensor:
    """Return where the largest are that a pattern allows, bool [out, in]: of W^2, or of W^2 diag(H) where H is given.

    By W^2 diag(H) all rows keep the same share, as Wanda compares the weights of an output only.
    """
    size = weight.double().square()
    if hessian is None:
        return largest_allowed(size, pattern)
    size *= torch.diagonal(hessian).double()
    if isinstance(pattern, KeptOfGroup):
        return largest_of_groups(size, pattern)
    counts = shares(pattern.kept(*size.shape), [1] * len(size))
    return torch.stack([largest_of_all(row, count) for row, count in zip(size, counts, strict=True)])


def stored_in(weight: Tensor, squares: Tensor, fmt: Format) -> PackedWeight:
    """Return a weight in a format, rounded to the nearest; where single weights go, those that contribute least do.

    Grids are clipped as long as the error of the outputs falls, for inputs that nothing relates to one another.

    Args:
        weight: float32 [out, in].
        squares: mean squares of its inputs, float [in].
    """
    if (pattern := pattern_of(fmt)) is None:
        return awq_quantize(weight, squares, fmt)
    hessian = torch.diag(squares.double())
    factor = torch.diag((squares.double() + _DAMPENING * squares.double().mean() + 1e-30).rsqrt())
    return round_entries(weight, hessian, factor, largest_entries(weight, hessian, pattern), fmt, refit=False)


def left_entries(weight: Tensor, pattern: Pattern) -> Tensor | None:
    """Return what a pattern allows with all that are not zero, bool [out, in]; None if these are too many."""
    is_left = weight != 0
    if isinstance(pattern, SingleZeros):
        count = pattern.kept(*weight.shape)
        return largest_of_all(is_left.float(), count) if int(is_left.sum()) <= count else None
    most = int(is_left.view(len(weight), -1, pattern.size).sum(-1).max())
    return largest_of_groups(is_left.float(), pattern) if most <= pattern.kept else None


def surgeon_entries(weight: Tensor, R: Tensor, pattern: Pattern) -> Tensor:
    """Return what SparseGPT keeps, bool [out, in]: of some columns the largest W^2 / diag(R)^2, once the columns in
    front of them have been left out.

    These are the columns of a group, of which each row keeps N; or 128 columns, of which all rows together keep as
    many as of others.
    """
    kept = torch.zeros(weight.shape, dtype=torch.bool)
    width = pattern.size if isinstance(pattern, KeptOfGroup) else _BLOCK
    sizes = [min(width, weight.shape[1] - first) for first in range(0, weight.shape[1], width)]
    counts = shares(pattern.kept(*weight.shape), sizes) if isinstance(pattern, SingleZeros) else []

    def choose(W: Tensor, i: int) -> Tensor:
        if i % width == 0:
            columns = slice(i, i + width)
            loss = (W[columns] / torch.diagonal(R)[columns, None]).t().square()
            if isinstance(pattern, KeptOfGroup):
                kept[:, columns] = largest_of_groups(loss, pattern)
            else:
                kept[:, columns] = largest_of_all(loss, counts[i // width])
        return W[i] * kept[:, i]

    _sweep(weight.double(), R, width, choose)
    return kept


def alps_entries(
    weight: Tensor, hessian: Tensor, R: Tensor, pattern: Pattern, damp: float, *, refit: bool = True
) -> Tensor:
    """Return what ADMM keeps, bool [out, in], or where it loses more, what it began with: SparseGPT's.

    Of N:M that is decided row by row; otherwise for all rows, as they share what may stay.
    """
    W, H = weight.double(), hessian.double()
    start = surgeon_entries(weight, R, pattern)
    found = admm_masks(W, hessian, start, damp, lambda size: largest_allowed(size, pattern))
    losses = [_row_losses(W - only_kept_entries(W, R, H, kept, refit=refit), H) for kept in (start, found)]
    if isinstance(pattern, SingleZeros):
        return found if float(losses[1].sum()) < float(losses[0].sum()) else start
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
        kept: bool [out, in], as many as the format keeps.
        fmt: that leaves out single weights.
        refit: whether others make up for what is left out; they always do for what rounding loses.
    """
    W, H, plain, stored = weight.double(), hessian.double(), fmt.of_kept, _Stored(kept, fmt)
    target = only_kept_entries(W, R, H, kept, refit=refit)
    start = rtn_quantize(stored.take(target).float(), plain, lambda group, _: _search(group, plain))
    _, scales, zeros = unpack(start)  # [out, groups]
    unit, codes = start.parts.get("tensor_scale"), torch.zeros(W.shape, dtype=torch.uint8)
    steps = scales if unit is None else scales * unit

    def choose(W: Tensor, i: int) -> Tensor:
        group = stored.group(i)
        step, zero = steps[:, group], None if zeros is None else zeros[:, group]
        code = round_to_grid(W[i, :, None], step, zero, plain)
        codes[:, i] = code[:, 0]
        return grid_values(code, step, zero, plain)[:, 0] * kept[:, i]

    _sweep(W if refit else target, R, 1, choose)
    swept = pack(stored.take(codes), scales, zeros, plain, unit)
    found = [stored.pack(one) for one in (start, swept)]
    losses = [float(quadratic(W - dequantize(one), H)) for one in found]
    return found[1] if losses[1] < losses[0] else found[0]


class _Stored:
    """How weights that are kept lie in the dense format behind a pattern: by themselves, or at their own places."""

    def __init__(self, kept: Tensor, fmt: Format) -> None:
        self.kept, self.groups, self.singles = kept, fmt.extra(KeptOfGroup), fmt.extra(SingleZeros)
        assert self.groups is not None or self.singles is not None
        count = fmt.stored_columns(kept.shape[1])
        self.order = (~kept).long().argsort(dim=1, stable=True)[:, :count]  # of N:M: columns kept, rising
        self.size = fmt.of_kept.columns(count)

    def take(self, values: Tensor) -> Tensor:
        """Return the values [out, in] that are stored, [out, stored]."""
        return values if self.groups is None else values.gather(1, self.order)

    def group(self, i: int) -> int:
        """Return the group of a column that is kept."""
        return (i if self.groups is None else i // self.groups.size * self.groups.kept) // self.size

    def pack(self, dense: PackedWeight) -> PackedWeight:
        """Return the weight of which only these are stored."""
        if self.singles is not None:
            return leave_out_singles(dense, self.kept, self.singles)
        assert self.groups is not None
        return leave_out_of_groups(dense, self.kept, self.groups)


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
