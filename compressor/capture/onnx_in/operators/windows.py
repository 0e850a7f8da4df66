"""Pooling: operators over windows of an image or signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.products import pads_of
from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call, refuse


class _Windows:
    """Geometry of a pooling node over an input [N, C, spatial...]."""

    def __init__(self, call: Call, x: Tensor) -> None:
        self.kernel: list[int] = call.get("kernel_shape")
        self.dims = len(self.kernel)
        if self.dims != x.dim() - 2 or self.dims not in (1, 2, 3):
            raise refuse(f"it pools {x.dim() - 2} dimensions by windows of {self.dims}")
        self.strides: list[int] = call.get("strides", [1] * self.dims)
        self.dilations: list[int] = call.get("dilations", [1] * self.dims)
        self.pads = pads_of(call, x.shape[2:], self.kernel, self.strides, self.dilations)
        self.sizes: list[Any] = list(x.shape[2:])
        self.spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        self.ceil = bool(call.get("ceil_mode", 0)) and call.get("auto_pad", "NOTSET") == "NOTSET"

    def alike(self) -> bool:
        """Return whether PyTorch's pooling has these pads."""
        return all(a == b and isinstance(a, int) and 2 * a <= k
                   for (a, b), k in zip(self.pads, self.kernel, strict=True))  # fmt: skip

    def extended(self) -> list[tuple[Any, Any]]:
        """Return the pads, those behind raised so that windows which begin inside are whole where sizes round up."""
        if not self.ceil:
            return self.pads
        result = []
        for size, span, stride, (before, after) in zip(self.sizes, self.spans, self.strides, self.pads, strict=True):
            if not isinstance(size, int):
                raise refuse("it rounds up the number of windows over a size that varies")
            count = -(-(size + before + after - span) // stride) + 1
            if (count - 1) * stride >= size + before:
                count -= 1
            result.append((before, max((count - 1) * stride + span - size - before, after)))
        return result


def _padded(x: Tensor, pads: Sequence[tuple[Any, Any]], value: float) -> Tensor:
    return F.pad(x, [amount for pair in reversed(pads) for amount in pair], value=value)


@operator("MaxPool")
def max_pool(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Return the largest element of each window, and where it is."""
    x, windows = call.tensor(0), _Windows(call, call.tensor(0))
    dtype = x.dtype
    if not x.is_floating_point():
        x = x.to(torch.float64 if dtype.itemsize > 2 else torch.float32)
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[windows.dims - 1]
    if call.outputs > 1:
        return _with_indices(call, x, windows, dtype)
    if windows.alike() and not windows.ceil:
        pads = [before for before, _ in windows.pads]
        done: Tensor = pool(x, windows.kernel, windows.strides, pads, windows.dilations)
        return done.to(dtype) if done.dtype != dtype else done
    wide = _padded(x, windows.extended(), -math.inf)
    done = pool(wide, windows.kernel, windows.strides, 0, windows.dilations)
    return done.to(dtype) if done.dtype != dtype else done


def _with_indices(call: Call, x: Tensor, windows: _Windows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return maxima and their places in the whole tensor, counted with its dimensions in order or in reverse."""
    if not all(isinstance(size, int) for size in windows.sizes):
        raise refuse("it returns places in images of a size that varies")
    pads = windows.extended()
    wide = _padded(x, pads, -math.inf)
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[windows.dims - 1]
    values, flat = pool(wide, windows.kernel, windows.strides, 0, windows.dilations, return_indices=True)
    places: list[Tensor] = []
    for size, (before, _) in zip(reversed(wide.shape[2:]), reversed(pads), strict=True):
        places.insert(0, flat % size - before)
        flat = flat // size
    order = list(range(windows.dims))
    if call.get("storage_order", 0):
        order.reverse()
    place, area = torch.zeros_like(places[0]), 1
    for axis in order:
        place = place * windows.sizes[axis] + places[axis]
        area *= windows.sizes[axis]
    images = torch.arange(x.shape[0] * x.shape[1]).reshape([x.shape[0], x.shape[1]] + [1] * windows.dims)
    return values.to(dtype), place + images * area


@operator("AveragePool", "LpPool")
def average_pool(call: Call) -> Tensor:
    """Return the mean, or the norm, of each window."""
    x, windows = call.tensor(0), _Windows(call, call.tensor(0))
    if call.op == "LpPool":
        p = call.get("p", 2)
        total = _sums(torch.abs(x) ** p, windows, windows.extended())
        norm: Tensor = total ** (1.0 / p)
        return norm
    padding_counts = bool(call.get("count_include_pad", 0))
    plain = all(d == 1 for d in windows.dilations)
    no_pads = all(amount == 0 for pair in windows.pads for amount in pair)
    if plain and windows.alike() and not windows.ceil and (padding_counts or windows.dims < 4):
        pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[windows.dims - 1]
        pads = [before for before, _ in windows.pads]
        done: Tensor = pool(x, windows.kernel, windows.strides, pads, False, padding_counts or no_pads)
        return done
    pads_whole = windows.extended()
    ones = torch.ones([1, 1, *windows.sizes], dtype=x.dtype)
    if padding_counts:
        ones = _padded(ones, windows.pads, 1.0)
        behind = [(0, whole[1] - pair[1]) for whole, pair in zip(pads_whole, windows.pads, strict=True)]
        count = _sums(ones, windows, behind)
    else:
        count = _sums(ones, windows, pads_whole)
    return _sums(x, windows, pads_whole) / count


def _sums(x: Tensor, windows: _Windows, pads: Sequence[tuple[Any, Any]]) -> Tensor:
    """Add up each window: a convolution with ones, channel by channel."""
    channels = x.shape[1]
    wide = _padded(x, pads, 0.0)
    flat = wide.reshape([-1, 1, *wide.shape[2:]])
    ones = torch.ones([1, 1, *windows.kernel], dtype=x.dtype)
    apply: Any = (F.conv1d, F.conv2d, F.conv3d)[windows.dims - 1]
    total: Tensor = apply(flat, ones, None, windows.strides, 0, windows.dilations)
    return total.reshape([x.shape[0], channels, *total.shape[2:]])


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(call: Call) -> Tensor:
    """Reduce all spatial dimensions."""
    x = call.tensor(0)
    axes = list(range(2, x.dim()))
    if call.op == "GlobalMaxPool":
        return torch.amax(x, axes, True)
    if call.op == "GlobalLpPool":
        p = call.get("p", 2)
        norm: Tensor = torch.sum(torch.abs(x) ** p, axes, True) ** (1.0 / p)
        return norm
    return torch.mean(x, axes, True)


@operator("MaxUnpool")
def max_unpool(call: Call) -> Tensor:
    """Put maxima back to where they were, zeros elsewhere."""
    x, places = call.tensor(0), call.tensor(1)
    kernel = call.get("kernel_shape")
    dims = len(kernel)
    strides, pads = call.get("strides", [1] * dims), call.get("pads", [0] * 2 * dims)
    least = [(x.shape[2 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + dims] for i in range(dims)]
    shape = [*x.shape[:2], *least]
    if not all(isinstance(size, int) for size in shape):
        raise refuse("its sizes vary")
    flat = torch.zeros(math.prod(shape), dtype=x.dtype).scatter(0, places.reshape(-1), x.reshape(-1))
    small = flat.reshape(shape)
    if not call.has(2):
        return small
    wanted = call.numbers(2, "the sizes")
    return F.pad(small, [n for a, b in reversed(list(zip(shape, wanted, strict=True))) for n in (0, b - a)])
