"""Grids that lose less than min-max grids: the range is changed as long as the weighted squared error falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.numerics.clustering import cluster
from compressor.numerics.grids import choose_grid, empty_scale, nearest_values, over_shared, round_scales
from compressor.numerics.products.deterministic import even

Observer: TypeAlias = Literal["minmax", "mse", "output"]
"""How a group's grid is chosen: by its range, or by :func:`search_grid` with the weight of each column, or with the
Hessian, whose error is that of the outputs."""

ChooseGrid: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(weight of a group float32 [out, columns], which columns) -> its scales and zeros, as :func:`search_grid`."""

_SHRINKS = tuple(1 - 0.03 * step for step in range(14))
OUTPUT_RATIOS = (1.0, *(ratio / 100 for ratio in range(120, 38, -2) if ratio != 100))
"""Ranges to try in place of the largest size where outputs are looked at: around it, evenly apart (LiDAR-PTQ: Zhou et
al. 2024, arXiv 2401.15865, section 3.1)."""
_CUTS = 28  # of grids whose negative scales would be the same ones: as many tries
_FEW_BITS = 3  # up to which a grid's best range is but a part of the weight's; of one bit it is the mean size


def search_grid(weight: Tensor, importance: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """Search the grid of one group of columns with the least sum over columns of importance * error ** 2; or, given a
    matrix, with the least error times matrix times error.

    A symmetric grid of integers has one code more below zero than above.  Its scale may be negative, so that the code
    more serves the sign of the largest weight.

    Args:
        weight: float32 [out, columns]; for the tensor strategy, the whole weight.
        importance: [columns], such as the diagonal of the Hessian; all zeros count as all ones.  Or [columns, columns],
            such as the Hessian; codebooks take its diagonal.
    Returns:
        scales float32 [out] that the format can store and zeros uint8 [out] (None when symmetric), never worse than
        min-max.
    Raises:
        CompressorError: as :func:`compressor.numerics.grids.choose_grid`.
    """
    matrix = None if importance.dim() == 1 or fmt.codebook else importance
    importance = importance if importance.dim() == 1 else torch.diagonal(importance)
    importance = importance.float() if bool(importance.any()) else torch.ones_like(importance, dtype=torch.float32)
    mean = importance.mean()
    importance = importance / mean
    importance = importance.clamp(min=1e-3)  # an input that these samples hardly excite may matter elsewhere
    if matrix is not None:
        importance = (matrix / mean).float()
        importance.diagonal().add_(1e-3)
    if fmt.codebook:
        return cluster(weight, importance.expand_as(weight), fmt.levels, choose_grid(weight, fmt)[0]), None
    scales, zeros = choose_grid(weight, fmt)
    least = _error(weight, importance, scales, zeros, fmt)
    for scale, zero in _candidates(weight, fmt, _SHRINKS if matrix is None else OUTPUT_RATIOS):
        error = _error(weight, importance, scale, zero, fmt)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, scale, scales)
        if zeros is not None and zero is not None:
            zeros = torch.where(better, zero, zeros)
    return scales, zeros


def chooser(observer: Observer, hessian: Tensor, fmt: Format) -> ChooseGrid:
    """How a pass chooses grids; ``hessian`` is of all columns."""

    def choose(group: Tensor, columns: slice) -> tuple[Tensor, Tensor | None]:
        if observer == "minmax":
            return choose_grid(group, fmt)
        part = torch.diagonal(hessian)[columns] if observer == "mse" else hessian[columns, columns]
        return search_grid(group, part, fmt)

    return choose


def _candidates(weight: Tensor, fmt: Format, ratios: Sequence[float]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Grids of ranges in those ratios, of which the first is 1, to the weight's own."""
    if fmt.scale_type == "E8M0":
        yield 2 * choose_grid(weight, fmt)[0], None  # what lies above the largest value is rounded rather than cut
        return
    low, high = torch.aminmax(weight, dim=1)
    low, high = over_shared(low, fmt, torch.amin), over_shared(high, fmt, torch.amax)
    if fmt.symmetric:
        extreme = torch.where(-low > high, low, high)
        mirrored = fmt.bit_planes is not None or (
            fmt.element is not None and fmt.element.is_float
        )  # a negative scale: the same
        top = fmt.zero_point if fmt.element is None else fmt.element.max_value
        for ratio in _plane_ratios(fmt.bits) if fmt.bit_planes else ratios:
            scale = round_scales((extreme.abs() if mirrored else extreme) * (ratio / top), fmt)
            scale = torch.where(extreme == 0, empty_scale(fmt), scale)
            yield scale, None
            if not mirrored:
                yield -scale, None
        return
    for ratio in ratios[1:]:
        yield choose_grid(torch.stack([low, high], dim=1) * ratio, fmt)


def _plane_ratios(bits: int) -> list[float]:
    return [(0.94 if bits <= _FEW_BITS else 0.98) ** step for step in range(_CUTS)]


def _error(weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """[out]; the sum of rows that share a grid, in every place."""
    difference = nearest_values(weight, scales, zeros, fmt).sub_(weight)
    if importance.dim() == 1:
        return over_shared(difference.square_() @ importance, fmt, torch.sum)
    padded = even(difference)
    return over_shared(((padded @ even(importance)) * padded).sum(1)[: len(weight)], fmt, torch.sum)


Work = Mapping[str, float]
"""Amounts of work by unit; :data:`compressor.plan.prices.UNITS` lists the units."""


_CANDIDATES = {True: 29, False: 14}  # grids that search_grid tries, symmetric or not


_CLUSTER_BYTES = 16 * 129**2  # of element-wise traffic, a row and level of compressor.numerics.clustering.cluster


def grid_work(rows: int, columns: int, fmt: Format, searches: int, *, searched: bool = True) -> dict[str, float]:
    """Return the work of choosing a weight's grids ``searches`` times, by search or range; codebooks always cluster."""
    if fmt.codebook:
        each = _CLUSTER_BYTES * rows * fmt.groups(columns) * (fmt.levels + 6)
        return {"grid_element": 0.0, "stream_byte": float(searches * (1 + searched) * each)}
    return {"grid_element": float(searches * (_CANDIDATES[fmt.symmetric] if searched else 0) * rows * columns)}


def observer_work(rows: int, columns: int, fmt: Format, observer: Observer) -> Counter[str]:
    """Return the work of choosing a weight's grids once; ``output`` adds a product with the Hessian for each try."""
    work = Counter(grid_work(rows, columns, fmt, 1, searched=observer != "minmax"))
    if observer == "output" and not fmt.codebook:
        tried = len(OUTPUT_RATIOS) * (2 if fmt.symmetric else 1)
        work["grid_element"] = tried * rows * columns
        work["matmul_flop"] += 2 * tried * rows * columns * fmt.columns(columns)
    return work
