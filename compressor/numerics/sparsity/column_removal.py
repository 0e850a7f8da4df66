"""Choose inputs that a linear can do without, and refit its other columns to the outputs that it had.

Symbols: W the weight [out, in], H = 2 / n X^T X of its inputs, K the columns that are kept.  The refit is the least
squares solution W' = W H[:, K] H[K, K]^-1, which is where optimal brain surgery ends after removing the others one by
one (Hassibi and Stork 1993; of whole columns, Kurtic et al. 2023, ZipLM, arXiv 2302.04089, section 3.1).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.numerics.obs import raised_factor
from compressor.numerics.products.deterministic import half_product, product, quadratic
from compressor.numerics.range_search import Work

Importance: TypeAlias = Literal["obs", "activation", "magnitude"]
"""How a channel's loss is estimated: by what is lost once the others make up for it, by the size of its contribution to
the outputs, or by the size of its weights alone."""

_ROUNDS = 8  # in which channels are removed; each sees the Hessian of those that are left
_DAMPING = 1e-4  # of the Hessian's mean diagonal: the refit's gain on the samples should hold on other text


def choose_channels(
    weight: Tensor, hessian: Tensor, columns: Tensor, count: int, importance: Importance, groups: int = 1
) -> Tensor:
    """Return the channels to keep, rising, int64 [count].

    Args:
        weight: float [out, in], of all linears that read the channels, one below the other.
        hessian: float32 [in, in], a positive multiple of X^T X.
        columns: int64 [channels, columns of one]: a channel goes with all of its columns.
        count: channels to keep, a multiple of ``groups``.
        groups: runs of channels, as long as one another, of which each keeps as many.
    Raises:
        CompressorError: the Hessian is not positive definite, even when it is dampened.
    """
    W, H = weight.double(), hessian.double()
    kept = torch.arange(len(columns))
    if importance != "obs":
        size = W.square().sum(0)
        if importance == "activation":
            size = size * torch.diagonal(H)
        return _largest(size[columns].sum(1), count, groups)
    for turn in range(_ROUNDS):
        left = len(columns) - (len(columns) - count) // groups * (turn + 1) // _ROUNDS * groups
        if left < len(kept):
            kept = kept[_largest(_obs_losses(W, H, columns[kept]), left, groups)]
    return kept


def _largest(values: Tensor, count: int, groups: int) -> Tensor:
    """Return the places of each run's largest values, rising; of equal ones the first."""
    runs = values.reshape(groups, -1)
    places = torch.argsort(runs, dim=1, descending=True, stable=True)[:, : count // groups].sort(1).values
    return (places + runs.shape[1] * torch.arange(groups)[:, None]).flatten()


def _obs_losses(W: Tensor, H: Tensor, columns: Tensor) -> Tensor:
    """Return what removing each channel alone costs after the others are refitted: tr(W_g [H^-1]_gg^-1 W_g^T)."""
    flat = columns.flatten()
    R = inverse_factor(H[flat][:, flat])  # H^-1 = R^T R
    of_channels = R.t().reshape(*columns.shape, -1)
    blocks = of_channels @ of_channels.transpose(1, 2)  # [channels, k, k]
    refitted = W.t()[flat].reshape(*columns.shape, -1)  # [channels, k, out]
    losses: Tensor = (refitted * torch.linalg.solve(blocks, refitted)).sum((1, 2))
    return losses


def inverse_factor(H: Tensor) -> Tensor:
    """Return upper R with (H + D)^-1 = R^T R, D the dampening, ten times larger as long as the factorisation fails."""
    mean = float(torch.diagonal(H).mean()) or 1.0
    try:
        return raised_factor(H, torch.zeros(len(H), dtype=torch.bool), mean, _DAMPING, 1.0)[0]
    except CompressorError as error:
        raise CompressorError(
            "the Hessian of the inputs is not positive definite; give other calibration samples"
        ) from error


def only_columns(weight: Tensor, kept: Tensor) -> Tensor:
    """Return the weight with all columns but the kept ones at zero."""
    found = torch.zeros_like(weight)
    found[:, kept] = weight[:, kept]
    return found


def refit_columns(weight: Tensor, hessian: Tensor, kept: Tensor) -> Tensor:
    """Return the weight whose other columns are zero and whose kept ones make up for them, float32 [out, in].

    Never worse under ``hessian`` than the weight with the others at zero, which is returned where it would be.

    Args:
        kept: columns, int64 [n].
    Raises:
        CompressorError: the Hessian is not positive definite, even when it is dampened.
    """
    W, H = weight.double(), hessian.double()
    R = inverse_factor(H[kept][:, kept])
    plain, refitted = only_columns(W, kept), torch.zeros_like(W)
    # W' - W_K = W_rest H[rest, K] H[K, K]^-1: the dampening then draws towards the weight, not towards zero.
    refitted[:, kept] = W[:, kept] + product(product(product(W - plain, H[:, kept]), R.t()), R)
    losses = [float(quadratic(W - found, H)) for found in (plain, refitted)]
    return (refitted if losses[1] <= losses[0] else plain).float()


def removal_work(rows: int, columns: int, importance: Importance) -> Work:
    """Return the work of choosing a weight's channels and refitting it."""
    factors = 1 + (_ROUNDS if importance == "obs" else 0)
    return {
        "factor64_flop": 4 / 3 * factors * columns**3,
        "matmul64_flop": 2 * (3 + 2 * half_product(columns) * 2) * rows * columns**2,
        "stream_byte": 8 * (6 * factors * columns**2 + 8 * rows * columns),
    }


def removal_working_bytes(rows: int, columns: int) -> int:
    """Return the bytes that choosing and refitting work in: the Hessian and the weight in float64, and their copies."""
    return 8 * (4 * columns**2 + 5 * rows * columns)
