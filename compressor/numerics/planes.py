"""Choose codes of 8 bits whose upper halves are good alone: GPTQ for two precisions of one stored weight at once.

An upper half numbers a cell of 16 codes.  Where a compensated weight lies near the edge of a cell, the code on the
other side of it costs the whole code little and may serve the upper half much better::

    cell      |  16 codes  |  16 codes  |
    fine           nearest code: c0 .X      <- W, less the errors of the codes so far
    coarse                  X: cell of u    <- W, less the errors of the upper halves so far
    candidates                  c0 |c1      c1: the code of cell u that is nearest to fine
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, pack, unpack
from compressor.numerics.grids import grid_values, round_to_grid
from compressor.numerics.products.deterministic import total

_CELL = 16  # codes with the same upper half
_OF_CODES = 2.0  # weight of a code's squared error beside its upper half's: what is verified counts more than a draft


def upper_weight(packed: PackedWeight) -> PackedWeight:
    """Return what is read where the upper plane of a weight is read alone."""
    upper = packed.format.upper
    return PackedWeight({name: packed.parts[name] for name in upper.parts(*packed.shape)}, upper, packed.shape)


def round_both(fine: Tensor, coarse: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Round a column so that the squared errors of codes, counted twice, and of their upper halves are least in sum.

    Args:
        fine: float64 [out], to be near the codes' values.
        coarse: float64 [out], to be near the values of their upper halves.
        scale: float32 [out].
        fmt: of codes in two planes.
    Returns:
        codes uint8 [out], and the values of both, float64 [2 * out].
    """
    nearest = round_to_grid(fine[:, None], scale, None, fmt)
    cell = round_to_grid(coarse[:, None], fmt.upper.factor * scale, None, fmt.upper) * _CELL
    inside = torch.minimum(torch.maximum(nearest, cell), cell + (_CELL - 1))
    wanted = torch.cat([fine, coarse])
    found = []
    for code in (nearest, inside):
        values = torch.cat([
            grid_values(code, scale, None, fmt),
            grid_values(code // _CELL, scale, None, fmt.upper),
        ]).double()[:, 0]  # fmt: skip
        of_codes, of_halves = (wanted - values).square().chunk(2)
        found.append((code[:, 0], values, _OF_CODES * of_codes + of_halves))
    (code, values, loss), (other, its_values, its_loss) = found
    better = its_loss < loss
    return torch.where(better, other, code), torch.where(better.repeat(2), its_values, values)


def sweep_planes(
    W: Tensor, Hinv: Tensor, start: PackedWeight, order: Tensor, blocks: list[tuple[int, int]]
) -> tuple[PackedWeight, float]:
    """Run GPTQ's sweep (:func:`compressor.numerics.obs.sweep`) for codes and for their upper halves side by side.

    The errors of each are spread over its own copy of the weight; both copies have the grids of ``start``.

    Returns:
        The packed weight, and ||Err||^2 of both together.
    """
    out_features, in_features = W.shape
    fmt, size = start.format, start.format.columns(in_features)
    scales = unpack(start)[1].t().contiguous()  # [groups, out]
    codes = torch.empty(in_features, out_features, dtype=torch.uint8)
    both = W.t()[order].repeat(1, 2)  # [in, 2 * out]
    places, diagonal, squares = order.tolist(), torch.diagonal(Hinv).tolist(), 0.0
    for first, last in blocks:
        Err = torch.empty(last - first, 2 * out_features, dtype=W.dtype)
        for i in range(first, last):
            codes[places[i]], values = round_both(
                both[i, :out_features], both[i, out_features:], scales[places[i] // size], fmt
            )
            Err[i - first] = (both[i] - values) / diagonal[i]
            both[i + 1 : last].addmm_(Hinv[i, i + 1 : last, None], Err[i - first, None], alpha=-1)
        both[last:].addmm_(Hinv[first:last, last:].t(), Err, alpha=-1)
        squares += float(total(Err.square()))
    return pack(codes.t().contiguous(), scales.t(), None, fmt), squares
