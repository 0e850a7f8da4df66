"""GPTQ of depthwise convolutions: each row of the weight reads inputs of its own, and has a Hessian of its own.

The arithmetic is that of :mod:`compressor.numerics.obs` for all channels at once.  Matrices are as small as the kernel
has taps, so the inverse is updated column by column as in Optimal Brain Quantization (Frantar and Alistarh 2022, arXiv
2208.11580, eq. 4), which gives the numbers of the Cholesky form.  All of it is element-wise: bits do not depend on
the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, pack, unpack
from compressor.numerics.grids import grid_values, round_to_grid
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import MATCH_DAMPENING
from compressor.numerics.products.deterministic import total
from compressor.numerics.range_search import Observer, chooser


@dataclass(frozen=True)
class ChannelInfo:
    """Facts about the quantisation of one depthwise weight.

    Attributes:
        error: sum over channels of (w - q) H (w - q)^T over that of w H w^T.
        rtn_error: the error of round to nearest.
        nearest: channels that are rounded to nearest, since GPTQ had no smaller error.
        dead_taps: taps that read zeros alone in all samples.
        notes: whatever of it the user should know.
    """

    error: float
    rtn_error: float
    nearest: int
    dead_taps: int

    @property
    def notes(self) -> list[str]:
        """Say what is unusual."""
        notes = []
        if self.nearest:
            notes.append(f"{self.nearest} channels rounded to nearest: GPTQ had no smaller error")
        if self.dead_taps:
            notes.append(f"{self.dead_taps} taps are zero in all samples")
        return notes


def quantize_channels(
    weight: Tensor, hessian: Tensor, fmt: Format, *, actorder: bool, dampening_frac: float, observer: Observer
) -> tuple[PackedWeight, ChannelInfo]:
    """Quantise tap after tap, spreading the error of each over the taps after it, for each channel on its own.

    Grids are those of the original weight; ranges are chosen by its error unless ``observer`` is ``minmax``.

    Args:
        weight: float [channels, taps].
        hessian: float32 [channels, taps, taps].
        actorder: quantise the taps of the largest inputs first.
    Raises:
        CompressorError: the Hessian holds NaN or inf, or the format stores weights as floats.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise CompressorError("gptq: the Hessian holds NaN or inf: the site's inputs overflow on these samples")
    if fmt.outlier_percent:
        raise CompressorError(f"gptq: {fmt.name} stores single weights as floats, which depthwise ones do not have")
    W, H, rows = weight.double(), hessian.double(), torch.arange(len(weight))
    taps, size = W.shape[1], fmt.columns(W.shape[1])
    rtn = rtn_quantize(weight, fmt)
    start = rtn_quantize(weight, fmt, chooser(observer, torch.eye(taps), fmt))
    _, scales, zeros = unpack(start)
    unit = 1.0 if "tensor_scale" not in start.parts else float(start.parts["tensor_scale"])
    order = torch.argsort(torch.diagonal(H, dim1=1, dim2=2), dim=1, descending=actorder, stable=True)
    order = order if actorder else torch.arange(taps).expand(len(W), -1)
    Hinv = _inverse(_dampened(H, dampening_frac))
    left, codes = W / unit, torch.empty(len(W), taps, dtype=torch.uint8)
    for i in range(taps):
        place = order[:, i]
        group = place // size
        scale, zero = scales[rows, group], None if zeros is None else zeros[rows, group]
        old = left[rows, place]
        code = round_to_grid(old[:, None], scale, zero, fmt)
        codes[rows, place] = code[:, 0]
        column = Hinv[rows, :, place]  # [channels, taps]
        pivot = column[rows, place]
        # delta = -(w_j - q_j) / [Hinv]_jj Hinv_(j, :); then j leaves the matrix (OBQ, eq. 2 and 4).
        left -= ((old - grid_values(code, scale, zero, fmt)[:, 0]) / pivot)[:, None] * column
        Hinv -= (column / pivot[:, None])[:, :, None] * column[:, None, :]
    return _better(pack(codes, scales, zeros, fmt, start.parts.get("tensor_scale")), rtn, W, H)


def match_dense_channels(weight: Tensor, hessian: Tensor, cross: Tensor) -> Tensor:
    """Correct each channel for inputs that earlier quantised layers have changed, as
    :func:`compressor.numerics.obs.match_dense` does for a linear.

    Args:
        weight: float [channels, taps].
        hessian, cross: float32 [channels, taps, taps].
    Returns:
        float32 [channels, taps].
    """
    if not bool(torch.isfinite(cross).all()):
        return weight
    Hinv = _inverse(_dampened(hessian.double(), MATCH_DAMPENING))
    W = weight.double()
    return (W + _times(_times(W, cross.double()), Hinv)).float()


def _dampened(H: Tensor, frac: float) -> Tensor:
    """Return H with a fraction of each channel's mean diagonal added to it; 1 in place of the zeros of dead taps."""
    diagonal = torch.diagonal(H, dim1=1, dim2=2)
    dead = diagonal <= 0
    alive = (~dead).sum(1).clamp(min=1)
    mean = (diagonal.masked_fill(dead, 0.0).sum(1) / alive)[:, None]
    mean = torch.where(mean > 0, mean, 1.0)
    H = H.masked_fill(dead[:, :, None] | dead[:, None, :], 0.0)
    return H + torch.diag_embed(max(frac, 1e-6) * mean + dead * mean)


def _inverse(H: Tensor) -> Tensor:
    """Invert positive definite matrices [n, k, k] by the sweep operator (Goodnight 1979), element-wise."""
    A = H.clone()
    for j in range(A.shape[1]):
        pivot, column = A[:, j, j].clone(), A[:, :, j].clone()
        A -= (column / pivot[:, None])[:, :, None] * column[:, None, :]
        A[:, :, j] = A[:, j, :] = column / pivot[:, None]
        A[:, j, j] = -1 / pivot
    return -A


def _times(W: Tensor, H: Tensor) -> Tensor:
    """Return w H for each channel, [channels, taps]."""
    return (W[:, :, None] * H).sum(1)


def _better(packed: PackedWeight, rtn: PackedWeight, W: Tensor, H: Tensor) -> tuple[PackedWeight, ChannelInfo]:
    """Keep of each channel what has the smaller error, and say which."""
    losses = [((d := W - dequantize(each).double()) * _times(d, H)).sum(1) for each in (packed, rtn)]
    worse = losses[0] > losses[1]
    if bool(worse.any()) and "tensor_scale" not in rtn.parts:
        (codes, scales, zeros), (near, spans, starts) = unpack(packed), unpack(rtn)
        codes, scales = codes.clone(), scales.clone()
        codes[worse], scales[worse] = near[worse], spans[worse]
        if zeros is not None and starts is not None:
            zeros = zeros.clone()
            zeros[worse] = starts[worse]
        packed = pack(codes, scales, zeros, packed.format)
        losses[0] = torch.minimum(*losses)
    norm = float(total((W * _times(W, H)).sum(1)))
    error, rtn_error = (max(0.0, float(total(loss))) / norm if norm > 0 else 0.0 for loss in losses)
    dead = int((torch.diagonal(H, dim1=1, dim2=2) <= 0).sum())
    return packed, ChannelInfo(error, rtn_error, int(worse.sum()), dead)
