"""AdaRound: learn whether each weight rounds up or down, then refine by coordinate descent.

Both minimise the error of a linear's outputs over the calibration samples, sum over rows of (Q - W) H (Q - W)^T, on
grids that stay as they are.  No rows of samples are needed: for a linear this is exactly the mean squared error of
its outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.formats.format import Format
from compressor.numerics.grids import grid_values, neighbour_codes, round_to_grid
from compressor.numerics.products.deterministic import EVEN, apply

_ZETA, _GAMMA = 1.1, -0.1  # eq. 23
_BETAS = tuple(range(20, 0, -2))  # of the regulariser, one after another; even ones need no logarithm
_WARM_UP = 0.2  # of the steps, without regulariser
_PRESSURE = 10.0  # the regulariser's weight, where the loss of rounding to nearest counts 1 a weight
_RATE, _MOMENTUM, _SQUARES = 0.05, 0.9, 0.999  # of Adam
_FLAT = 1e-3  # Adam's epsilon: at the start the soft-rounded weight is the weight, and gradients are noise
_BLOCK = 64  # columns between two updates of all slopes (speed only)
ROUNDING_ROWS = 64
"""Rows that are learned at once: few enough for their tensors to stay in the processor's caches."""
ROUNDING_SWEEPS = 12
"""Sweeps of the descent, at most."""


def learn_rounding(W: Tensor, H: Tensor, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """Learn whether each weight goes to the upper one of its two neighbours (AdaRound: Nagel et al. 2020, 2004.10568).

    Minimises the error of low + h(V) (high - low), with the rectified sigmoid h (eq. 23), plus the sum of
    1 - |2 h(V) - 1|^beta (eq. 24), beta falling from 20 to 2, by Adam from the weights themselves.  A row's loss
    is in units of what rounding it to nearest loses, so that one weight of the regulariser serves all layers.

    Args:
        W: float64 [out, in].
        H: float64 [in, in], positive definite.
        low, high: float64 [out, in], the values of the grid on both sides of the weight.
    Returns:
        bool [out, in].
    """
    found = []
    odd = -len(H) % EVEN
    twice = pad(2 * H, (0, odd, 0, odd)).float()
    for first in range(0, len(W), ROUNDING_ROWS):
        rows = slice(first, first + ROUNDING_ROWS)
        offset, gap = low[rows] - W[rows], high[rows] - low[rows]
        start = torch.where(gap > 0, -offset / torch.where(gap > 0, gap, 1.0), 0.5)
        nearest = offset + gap * (start >= 0.5)
        unit = ((nearest @ H) * nearest).mean(1, keepdim=True)
        unit = torch.maximum(unit, 1e-6 * (gap.square() * torch.diagonal(H)).mean(1, keepdim=True))
        unit = torch.where(unit > 0, unit, 1.0).sqrt()
        share = (start.clamp(0.01, 0.99) - _GAMMA) / (_ZETA - _GAMMA)
        even = (0, odd, 0, -len(gap) % EVEN)
        A, B, V = (pad(t, even).float() for t in (offset / unit, gap / unit, apply(torch.logit, share)))
        found.append(anneal(A, B, V, twice, steps)[: len(gap), : W.shape[1]] >= 0)
    return torch.cat(found)


def anneal(A: Tensor, B: Tensor, V: Tensor, twice: Tensor, steps: int) -> Tensor:
    """Minimise (A + B h(V)) H (A + B h(V))^T and the regulariser over V with so many steps of Adam, and return V.

    Every operator rounds each element once (no fused products), so the result does not depend on the number of
    threads.

    Args:
        A, B: float [rows, in]; offset and gap of each weight's two values.
        V: float [rows, in] to begin with.
        twice: float [in, in], 2 H.
    """
    mean, square = torch.zeros_like(V), torch.zeros_like(V)
    for step in range(steps):
        s = apply(torch.sigmoid, V)
        stretched = s * (_ZETA - _GAMMA) + _GAMMA
        h = stretched.clamp(0, 1)
        slope = ((A + B * h) @ twice) * B
        done = (step / steps - _WARM_UP) / (1 - _WARM_UP)
        if done >= 0:
            beta = _BETAS[int(done * len(_BETAS))]
            slope -= _power(2 * h - 1, beta - 1) * (2 * beta * _PRESSURE)
        slope *= (stretched == h) * (s * (1 - s) * (_ZETA - _GAMMA))  # h is flat where it is cut off
        mean += (slope - mean) * (1 - _MOMENTUM)
        square += (slope * slope - square) * (1 - _SQUARES)
        size = (square * (1 / (1 - _SQUARES ** (step + 1)))).sqrt() + _FLAT
        V = V - mean * (_RATE / (1 - _MOMENTUM ** (step + 1))) / size
    return V


def _power(x: Tensor, exponent: int) -> Tensor:
    """Raise x to a positive integer by squaring: pow is slower and not correctly rounded on every libm."""
    result = x if exponent % 2 else None
    while exponent := exponent // 2:
        x = x * x
        if exponent % 2:
            result = x if result is None else result * x
    assert result is not None
    return result


def neighbours(W: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the codes of the grid's values below and above each weight; beyond the grid's end, its end twice.

    Args:
        W: float64 [out, in].
        codes: uint8 [out, in], the nearest.
        scales, zeros: [out, groups].
    """
    above = spread_values(codes, scales, zeros, fmt) < W
    rising = (scales > 0).repeat_interleave(fmt.columns(W.shape[1]), dim=1)[:, : W.shape[1]]
    other = neighbour_codes(codes, above == rising, fmt)
    return torch.where(above, codes, other), torch.where(above, other, codes)


def spread_values(codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Return the values, float64, of codes uint8 [out, in] on grids [out, groups]."""
    size = fmt.columns(codes.shape[1])
    parts = []
    for group, part in enumerate(torch.split(codes, size, dim=1)):
        zero = None if zeros is None else zeros[:, group]
        parts.append(grid_values(part, scales[:, group], zero, fmt).double())
    return torch.cat(parts, dim=1)


def descend(W: Tensor, H: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format) -> Tensor:
    """Give one weight after another the code that is best as the others are, until none changes (at most 12 sweeps).

    Cyclic coordinate descent (QuantEase: Behdin et al. 2023, 2309.01885, section 3): along one weight the error is a
    parabola, and the best code is that of the value nearest to its lowest point.  The error never rises.

    Args:
        W: float64 [out, in].
        H: float64 [in, in], positive definite.
        codes: uint8 [out, in] to begin with.
        scales, zeros: [out, groups].
    Returns:
        uint8 [out, in].
    """
    size, Wt, codes = fmt.columns(W.shape[1]), W.t().contiguous(), codes.t().contiguous()  # columns contiguous
    Q = spread_values(codes.t(), scales, zeros, fmt).t().contiguous()
    for _ in range(ROUNDING_SWEEPS):
        changed, slopes = False, H @ (Q - Wt)  # halved
        for first in range(0, len(H), _BLOCK):
            block = slice(first, min(first + _BLOCK, len(H)))
            moves, ahead = torch.zeros_like(Wt[block]), slopes[block].clone()
            for i in range(block.start, block.stop):
                scale, zero = scales[:, i // size], None if zeros is None else zeros[:, i // size]
                code = round_to_grid((Q[i] - ahead[i - first] / H[i, i])[:, None], scale, zero, fmt)
                value = grid_values(code, scale, zero, fmt)[:, 0].double()
                move = value - Q[i]
                better = move * (2 * ahead[i - first] + move * H[i, i]) < 0
                if not bool(better.any()):
                    continue
                changed = True
                codes[i], Q[i] = torch.where(better, code[:, 0], codes[i]), torch.where(better, value, Q[i])
                moves[i - first] = torch.where(better, move, 0.0)
                ahead += H[block, i, None] * moves[i - first]
            slopes += H[:, block] @ moves
        if not changed:
            break
    return codes.t().contiguous()
