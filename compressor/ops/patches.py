"""The patches that a convolution reads: schema, eager definition and fake kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad


@custom_op("compressor::patches", mutates_args=())
def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Gather the inputs of each output of a 2-d convolution as a row: the convolution is a linear over these rows.

    Args:
        x: float32 [N, H, W, C].
        kernel, stride, padding, dilation: two each, of rows and columns; zeros are padded on both sides.
    Returns:
        float32 [N, H', W', kernel rows * kernel columns * C], with H' = (H + 2 * padding - dilation * (kernel - 1) - 1)
        // stride + 1.
    """
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    rows, columns = (
        outputs(n, *args) for n, *args in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True)
    )
    padded = pad(x, (0, 0, pw, pw, ph, ph))
    pieces = [
        padded[:, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return torch.cat(pieces, dim=-1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.sizes = inputs
    ctx.shape = x.shape


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Add each entry of a row to the input that it was read from, one place of the kernel after another."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = ctx.sizes
    images, height, width, channels = ctx.shape
    rows, columns = gradient.shape[1:3]
    pieces = gradient.reshape(*gradient.shape[:3], kh, kw, channels)
    padded = gradient.new_zeros(images, height + 2 * ph, width + 2 * pw, channels)
    for i in range(kh):
        for j in range(kw):
            read = padded[:, i * dh : i * dh + (rows - 1) * sh + 1 : sh, j * dw : j * dw + (columns - 1) * sw + 1 : sw]
            read += pieces[..., i, j, :]
    return padded[:, ph : ph + height, pw : pw + width].contiguous(), None, None, None, None


patches.register_autograd(_gradient, setup_context=_keep)


@patches.register_fake
def _(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    rows, columns = (
        outputs(n, *args) for n, *args in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True)
    )
    return x.new_empty(x.shape[0], rows, columns, kernel[0] * kernel[1] * x.shape[3])


def outputs(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    """Return the number of outputs of a convolution along one dimension; ``size`` may be symbolic."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
