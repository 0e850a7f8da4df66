"""Non-uniform values: weighted k-means in one dimension, of all rows of a weight at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressor.errors import CompressorError

_STEPS = 60
_PLACES, _ROWS = 128, 32
_LARGEST = 65504.0


def cluster(weight: Tensor, importance: Tensor, levels: int, start: Tensor | None = None) -> Tensor:
    """Values that a row's weights are rounded to, with a small sum of importance * error ** 2 (SqueezeLLM, eq. 4).

    The optimum over clusters that end at 128 places, by dynamic programming, and then Lloyd's iterations; sorted, a
    cluster is a stretch and its mean a difference of prefix sums.  Also from ``start``: each row keeps the better.

    Args:
        weight: float [out, n].
        importance: [out, n], not negative; a row without any counts as all ones.
        levels: values a row.
        start: float [out, levels], rising; the result is no worse.
    Returns:
        float32 [out, levels], rising, each a float16.
    Raises:
        CompressorError: the weight holds NaN, inf or values beyond float16.
    """
    if not bool((weight.abs() <= _LARGEST).all()):
        raise CompressorError(
            f"weights cannot be put on a codebook: they hold NaN, inf or values over {_LARGEST:g}; check the checkpoint"
        )
    x, order = weight.double().sort(dim=1)
    w = importance.double().gather(1, order)
    w = torch.where(w.amax(1, keepdim=True) > 0, w, 1.0)
    w = w / w.amax(1, keepdim=True)
    sums = torch.stack([torch.nn.functional.pad(v.cumsum(1), (1, 0)) for v in (w, w * x, w * x * x)])
    pieces = [slice(first, first + _ROWS) for first in range(0, len(x), _ROWS)]
    candidates = [_lloyd(x, sums, torch.cat([_optimum(x[i], w[i], sums[:, i], levels) for i in pieces]))]
    if start is not None:
        candidates += [_lloyd(x, sums, start.double())]
    losses = torch.stack([_loss(x, sums, values) for values in candidates])
    return torch.stack(candidates)[losses.argmin(0), torch.arange(len(x))].float()


def _optimum(x: Tensor, w: Tensor, sums: Tensor, levels: int) -> Tensor:
    """Return the best values [out, levels] among those whose clusters end at one of a few places of the sorted rows.

    The places are quantiles of (importance * frequency) ** (1/3), to which the best ends of many clusters are equally
    dense (Panter and Dite 1951); of up to 128 columns they are all.  D[k][j], the loss of k clusters over what is
    before place j, is the least over i of D[k - 1][i] and the loss of one cluster from i to j.
    """
    columns = x.shape[1]
    count = min(columns, _PLACES)
    places = torch.arange(columns + 1).expand(len(x), -1)
    if columns > count:
        gaps = torch.diff(x, dim=1, prepend=x[:, :1])
        mass = (w.clamp(min=1e-12) * gaps.square()).pow(1 / 3)  # frequency is 1 / gap, integrated over a gap
        mass = torch.where(mass.amax(1, keepdim=True) > 0, mass, 1.0).cumsum(1)
        shares = torch.arange(count, dtype=x.dtype) / count * mass[:, -1:]
        places = torch.cat([torch.searchsorted(mass, shares), torch.full((len(x), 1), columns)], dim=1)
        places[:, 0] = 0
    mass, first, second = sums.gather(2, places.expand(3, -1, -1))
    size = (mass[:, None, :] - mass[:, :, None]).clamp(min=0)  # of one cluster from i to j: [out, i, j]
    spread = (first[:, None, :] - first[:, :, None]).square() / size.clamp(min=1e-30)
    cost = (second[:, None, :] - second[:, :, None] - spread).clamp(min=0)
    cost.masked_fill_(torch.ones(count + 1, count + 1, dtype=torch.bool).tril(-1), math.inf)
    best = [cost[:, 0]]
    for _ in range(levels - 1):
        best.append((best[-1][:, :, None] + cost).amin(1))
    cuts = [torch.full((len(x), 1), count)]
    for before in reversed(best[:-1]):
        last = cost.gather(2, cuts[0][:, :, None].expand(-1, count + 1, 1))[:, :, 0]
        cuts.insert(0, (before + last).argmin(1, keepdim=True))
    ends = torch.cat([torch.zeros_like(cuts[0]), *cuts], dim=1)
    mass, first = (part.gather(1, ends).diff(dim=1) for part in (mass, first))
    found = torch.where(mass > 1e-9, first / mass.clamp(min=1e-9), math.nan)
    middle = x[:, columns // 2, None].expand_as(found)
    return torch.where(found.isnan(), middle, found).sort(dim=1).values


def _lloyd(x: Tensor, sums: Tensor, values: Tensor) -> Tensor:
    values = values.half().double()
    loss = _loss(x, sums, values)
    for _ in range(_STEPS):
        mass, first, _second = _stretches(x, sums, values)
        moved = torch.where(mass > 1e-9, first / mass.clamp(min=1e-9), values).half().double().sort(dim=1).values
        after = _loss(x, sums, moved)
        better = after < loss
        if not bool(better.any()):
            break
        values, loss = torch.where(better[:, None], moved, values), torch.where(better, after, loss)
    return values


def _stretches(x: Tensor, sums: Tensor, values: Tensor) -> Tensor:
    """Return sums of w, w x and w x^2 over the elements nearest to each value: [3, out, levels]."""
    ends = torch.searchsorted(x, (values[:, 1:] + values[:, :-1]) / 2, right=True)
    edge = ends.new_zeros(len(x), 1)
    places = torch.cat([edge, ends, edge + x.shape[1]], dim=1)
    return sums.gather(2, places.expand(3, -1, -1)).diff(dim=2)


def _loss(x: Tensor, sums: Tensor, values: Tensor) -> Tensor:
    mass, first, second = _stretches(x, sums, values)
    losses: Tensor = second - 2 * values * first + values.square() * mass
    return losses.sum(1)
