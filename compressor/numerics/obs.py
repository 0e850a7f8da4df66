"""GPTQ's arithmetic (Frantar et al. 2022, arXiv 2210.17323): the inverse Hessian's factor, the sweep over columns.

Symbols are those of the paper's algorithm 1: W the weight, H the Hessian, Hinv the upper Cholesky factor of the
inverse, (H + D)^-1 = Hinv^T Hinv with D the dampening, and Err its E.  Column i of Err is the error of column i, after
the updates by earlier columns, over Hinv[i, i].  The sweep leaves W - Q = Err Hinv, so that
tr((W - Q) (H + D) (W - Q)^T) = ||Err||^2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.format import Format
from compressor.formats.outliers import add_outliers
from compressor.formats.packing import PackedWeight, pack, unpack
from compressor.formats.planes import TwoPlanes
from compressor.numerics.grids import grid_values, round_to_grid
from compressor.numerics.products.bfloat16 import bfloat16_products
from compressor.numerics.products.deterministic import half_product, inverse_cholesky, product, total
from compressor.numerics.range_search import ChooseGrid, Observer, Work, grid_work, observer_work

_NEAR = 16  # columns whose errors go to one another one by one
MATCH_DAMPENING = 0.1  # 0.01 fits noise of 16,000 tokens, 1 gives half of the gain away


def match_dense(weight: Tensor, hessian: Tensor, cross: Tensor, *, rounded: bool = False) -> Tensor:
    """Return W' that minimises ||W X_dense - W' X||^2: correct W for inputs that earlier quantised layers have changed.

    W' = W (I + C (H + lambda I)^-1), with lambda = 0.1 mean(diag H) to stay near W.  This is the asymmetric calibration
    of GPTAQ (Li et al. 2025, arXiv 2504.02692), solved before the rounding rather than during it.

    Args:
        weight: float [out, in].
        hessian: 2 / n * X^T X, float32 [in, in].
        cross: 2 / n * (X_dense - X)^T X, float32 [in, in].
        rounded: the products that make the correction may round their factors to bfloat16.
    Returns:
        float32 [out, in].
    """
    H = hessian.to(torch.float64, copy=True)
    H.diagonal().add_(MATCH_DAMPENING * float(torch.diagonal(H).mean()))
    R = inverse_cholesky(H)
    if R is None or not bool(torch.isfinite(cross).all()):
        return weight  # dead or non-finite inputs; gptq_quantize reports them
    R = R.float()  # lambda keeps its condition low
    del H  # [in, in] in float64: free it before the products take as much
    with bfloat16_products(rounded):
        correction = product(product(product(weight.float(), cross), R.t()), R)
    return weight.float() + correction


def inverse_factor(H: Tensor, dead: Tensor, order: Tensor, mean: float, damp: float) -> Tensor:
    """Return upper R, float64, with (H + damp * mean * I)^-1 = R^T R, columns in the given order.

    With H = U U^T, U upper (the Cholesky factor of H read backwards), R is U^-1: one factorisation
    and one triangular inverse instead of the paper's Cholesky, inverse, Cholesky.
    """
    diagonal = torch.diagonal(H).double().masked_fill(dead, mean) + damp * mean
    places = order.flip(0)
    backwards = H[places][:, places].double()
    backwards.diagonal().copy_(diagonal[places])
    inverse = inverse_cholesky(backwards)
    if inverse is None:
        raise CompressorError("the Hessian is not positive definite")
    R = inverse.flip(0, 1)  # a copy
    del backwards, inverse
    if not bool(torch.isfinite(R.sum())):  # of all elements at once it would take as much memory again
        raise CompressorError("the inverse of the Hessian is not finite")
    return R


def raised_factor(H: Tensor, dead: Tensor, mean: float, damp: float, most: float) -> tuple[Tensor, float]:
    """Return :func:`inverse_factor` of the columns in their order, and the dampening that it took.

    That is ``damp``, or ten times more as long as the factorisation fails, up to ``most``.

    Raises:
        CompressorError: it fails with all of them.
    """
    order = torch.arange(len(H))
    while True:
        try:
            return inverse_factor(H, dead, order, mean, damp), damp
        except CompressorError:
            damp = max(10 * damp, 1e-4)
            if damp > most:
                raise


def column_blocks(in_features: int, group: int, blocksize: int) -> Iterator[tuple[int, int]]:
    """Yield column ranges, cut so that a group that spans several blocks begins with one and no group straddles two."""
    span = group if group > blocksize else blocksize // group * group
    for begin in range(0, in_features, span):
        end = min(begin + span, in_features)
        for first in range(begin, end, blocksize):
            yield first, min(first + blocksize, end)


def sweep(
    W: Tensor,
    Hinv: Tensor,
    start: PackedWeight,
    order: Tensor,
    blocks: list[tuple[int, int]],
    choose: ChooseGrid | None,
    outliers: Tensor | None,
) -> tuple[PackedWeight, float]:
    """Run algorithm 1 of the paper, on the grids of ``start`` or on grids chosen on the way.

    W and codes are held transposed, so that a column is contiguous: the paper's E Hinv is Hinv^T Err below.  Errors are
    applied to the next columns one by one, to the rest of the block by one product, and to later blocks by another.
    Outliers have no error: they take the compensated weight as it is (Dettmers et al. 2023, SpQR, arXiv 2306.03078,
    algorithm 1).

    Returns:
        The packed weight, and ||Err||^2.
    """
    out_features, in_features = W.shape
    fmt, size = start.format, start.format.columns(in_features)
    codes = torch.empty(in_features, out_features, dtype=torch.uint8)
    scales, zeros = _transposed_grids(start)
    unit = start.parts.get("tensor_scale")
    Wt = W.t()[order].contiguous() if unit is None else W.t()[order] / unit.double()
    places, diagonal = order.tolist(), torch.diagonal(Hinv).tolist()
    squares = 0.0
    for first, last in blocks:
        Err = torch.empty(last - first, out_features, dtype=W.dtype)
        for begin, end in column_blocks(last - first, size, _NEAR):
            near = slice(first + begin, first + end)
            for i in range(near.start, near.stop):
                group = places[i] // size
                if choose is not None and i % size == 0:
                    _set_grid(scales, zeros, group, *choose(Wt[i : i + size].t().float(), slice(i, i + size)))
                scale, zero = scales[group], None if zeros is None else zeros[group]
                code = round_to_grid(Wt[i, :, None], scale, zero, fmt)
                # E_j = (W_j - Q_j) / [Hinv]_jj, with the j-th diagonal element of the factor (eq. 2, algorithm 1).
                error = (Wt[i] - grid_values(code, scale, zero, fmt)[:, 0]) / diagonal[i]
                if outliers is not None:
                    error[outliers[:, places[i]]] = 0.0
                if i + 1 < near.stop:
                    # delta = -E_j Hinv_(j, j+1:), for the columns that are next (eq. 2, algorithm 1).
                    Wt[i + 1 : near.stop].addmm_(Hinv[i, i + 1 : near.stop, None], error[None], alpha=-1)
                Err[i - first] = error
                codes[places[i]] = code[:, 0]
            if near.stop < last:
                # W -= E Hinv of the columns just rounded, for the rest of the block (eq. 4).
                Wt[near.stop : last].addmm_(Hinv[near, near.stop : last].t(), Err[begin:end], alpha=-1)
        # W -= E Hinv of the whole block, for all later blocks (eq. 4, the paper's lazy batch update).
        Wt[last:].addmm_(Hinv[first:last, last:].t(), Err, alpha=-1)
        squares += float(total(Err.square()))
    squares *= 1.0 if unit is None else float(unit) ** 2
    packed = pack(codes.t().contiguous(), scales.transpose(0, 1), None if zeros is None else zeros.t(), fmt, unit)
    if outliers is None:
        return packed, squares
    compensated = torch.empty_like(Wt).index_copy_(0, order, Wt if unit is None else Wt * unit)
    return add_outliers(packed, compensated.t(), outliers, fmt.outlier_percent), squares


def _transposed_grids(start: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points with the group as first dimension, contiguous: :func:`unpack` may return views."""
    _, scales, zeros = unpack(start)
    scales = scales.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return scales, None if zeros is None else zeros.t().clone(memory_format=torch.contiguous_format)


def _set_grid(scales: Tensor, zeros: Tensor | None, group: int, scale: Tensor, zero: Tensor | None) -> None:
    scales[group] = scale
    if zeros is not None and zero is not None:
        zeros[group] = zero


def gptq_work(rows: int, columns: int, fmt: Format, *, observer: Observer, match_dense: bool) -> Work:
    """Work of :func:`compressor.passes.gptq.gptq_quantize`, when its first dampening suffices.

    Products of the [rows, columns] weight with the [columns, columns] Hessian: two losses and a norm, which read its
    upper half, and the updates of the remainder, which are half a product; with ``match_dense`` three in float32.
    """
    planes = 1 if fmt.extra(TwoPlanes) is None else 2  # each has its own weight, and its own errors
    size, cubed = planes * rows * columns, columns**3
    work = observer_work(rows, columns, fmt, observer)
    work.update(grid_work(rows, columns, fmt, 1, searched=False))
    work.update({
        "matmul64_flop": (3 * half_product(columns) + 1) * size * columns,
        "matmul_flop": (6 if match_dense else 0) * size * columns,
        "factor64_flop": (4 / 3 + (1 / 3 if match_dense else 0)) * cubed,
        "stream_byte": 8 * (8 * columns**2 + 8 * size),
        "rtn_element": 2 * size,
        "dequantize_element": 3 * size,
        "sweep_element": size,
        "sweep_column": columns,
    })  # fmt: skip
    return work


def gptq_working_bytes(rows: int, columns: int, fmt: Format) -> int:
    """Return the bytes that GPTQ works in: the weight, its transpose and a product in float64; the Cholesky factor of
    H^-1, two copies while it is flipped.

    The statistics themselves (float32, one or two of [columns, columns]) are not in it.
    """
    planes = 0 if fmt.extra(TwoPlanes) is None else 16
    return (4 + 8 + 8 + 8 + 3 + planes) * rows * columns + 3 * fmt.packed_bytes(rows, columns) + 20 * columns**2
