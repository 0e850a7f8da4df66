"""Products: matrices, convolutions, sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.values import Call, refuse


@operator("MatMul")
def matmul(call: Call) -> Tensor:
    """Multiply matrices."""
    return torch.matmul(call.tensor(0), call.tensor(1))


@operator("Gemm")
def gemm(call: Call) -> Tensor:
    """Multiply matrices and add a third."""
    a, b, c = call.tensor(0), call.tensor(1), call.maybe(2)
    a = a.t() if call.get("transA", 0) else a
    b = b.t() if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    product = torch.matmul(a, b)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    product = product if alpha == 1 else product * alpha
    return product if c is None else product + (c if beta == 1 else c * beta)


@operator("Linear")
def linear(call: Call) -> Tensor:
    """Apply a constant matrix [out, in]; our own step, in no file (:mod:`compressor.capture.onnx_in.program`)."""
    return F.linear(call.tensor(0), call.tensor(1), call.maybe(2))


@operator("Einsum")
def einsum(call: Call) -> Tensor:
    """Sum products by a formula."""
    return torch.einsum(call.get("equation").replace(" ", ""), *call.tensors())


def pads_of(call: Call, sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int],
            dilations: Sequence[int]) -> list[tuple[Any, Any]]:  # fmt: skip
    """Return the padding before and after each spatial dimension."""
    auto, count = call.get("auto_pad", "NOTSET"), len(kernel)
    if auto == "NOTSET":
        pads = call.get("pads", [0] * 2 * count)
        return [(pads[i], pads[i + count]) for i in range(count)]
    if auto == "VALID":
        return [(0, 0)] * count
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise refuse(f"auto_pad {auto!r} is not read")
    result = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        span = dilation * (k - 1) + 1
        if stride == 1:
            total: Any = span - 1
        elif isinstance(size, int):
            total = max(((size + stride - 1) // stride - 1) * stride + span - size, 0)
        else:
            raise refuse(f"auto_pad {auto} with strides pads by a size that varies")
        less = total // 2
        result.append((less, total - less) if auto == "SAME_UPPER" else (total - less, less))
    return result


def padded(x: Tensor, pads: Sequence[tuple[Any, Any]], value: float = 0.0) -> tuple[Tensor, list[Any]]:
    """Pad what differs between the two sides; return the tensor, and the padding that is left for both sides."""
    if all(before == after for before, after in pads):
        return x, [before for before, _ in pads]
    if any(amount < 0 for pair in pads for amount in pair):
        raise refuse("it pads by less than nothing")
    amounts = [amount for pair in reversed(pads) for amount in pair]
    return F.pad(x, amounts, value=value), [0] * len(pads)


@operator("Conv")
def conv(call: Call) -> Tensor:
    """Convolve in 1, 2 or 3 dimensions."""
    return convolve(call, call.tensor(0), call.tensor(1), call.maybe(2))


def convolve(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with the node's attributes."""
    dims = x.dim() - 2
    if dims not in (1, 2, 3):
        raise refuse(f"it is a convolution in {dims} dimensions")
    kernel = [int(size) for size in weight.shape[2:]]
    strides, dilations = call.get("strides", [1] * dims), call.get("dilations", [1] * dims)
    x, pads = padded(x, pads_of(call, x.shape[2:], kernel, strides, dilations))
    apply: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    result: Tensor = apply(x, weight, bias, strides, pads, dilations, call.get("group", 1))
    return result


@operator("ConvTranspose")
def conv_transpose(call: Call) -> Tensor:
    """Convolve transposed: all products, then the padding is cut off."""
    x, weight, bias = call.tensor(0), call.tensor(1), call.maybe(2)
    dims = x.dim() - 2
    if dims not in (1, 2, 3):
        raise refuse(f"it is a convolution in {dims} dimensions")
    kernel = [int(size) for size in weight.shape[2:]]
    strides, dilations = call.get("strides", [1] * dims), call.get("dilations", [1] * dims)
    extra, group = call.get("output_padding", [0] * dims), call.get("group", 1)
    wanted, auto = call.get("output_shape"), call.get("auto_pad", "NOTSET")
    pads = call.get("pads", [0] * 2 * dims)
    pairs: list[tuple[Any, Any]] = [(pads[i], pads[i + dims]) for i in range(dims)]
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        goal = wanted[-dims:] if wanted is not None else [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        pairs = []
        for i in range(dims):
            total = strides[i] * (x.shape[2 + i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - goal[i]
            less = total // 2
            pairs.append((total - less, less) if auto != "SAME_UPPER" else (less, total - less))
    apply: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    if all(a == b and isinstance(a, int) and a >= 0 for a, b in pairs) and all(
        e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)
    ):
        done: Tensor = apply(x, weight, bias, strides, [a for a, _ in pairs], extra, group, dilations)
        return done
    full: Tensor = apply(x, weight, bias, strides, 0, 0, group, dilations)
    cuts = [(-before, more - after) for (before, after), more in zip(pairs, extra, strict=True)]
    if bias is not None and any(cut > 0 for pair in cuts for cut in pair):
        raise refuse("its result is larger than all that it computes, and has a bias")
    return F.pad(full, [amount for pair in reversed(cuts) for amount in pair])


@operator("Col2Im")
def col2im(call: Call) -> Tensor:
    """Add up the blocks of an image where they overlap."""
    x, image, block = call.tensor(0), call.numbers(1, "the image's size"), call.numbers(2, "the block's size")
    dims = len(image)
    strides, dilations = call.get("strides", [1] * dims), call.get("dilations", [1] * dims)
    pads = call.get("pads", [0] * 2 * dims)
    if dims != 2 or pads[:2] != pads[2:]:
        raise refuse("images of two dimensions, padded alike on both sides, are read")
    folded: Tensor = F.fold(x, tuple(image), tuple(block), dilations, pads[:2], strides)
    return folded
