"""Operators that change shapes and orders, and those that fill tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.capture.onnx_in.operators.elementwise import convert
from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.stored import DTYPES
from compressor.capture.onnx_in.values import Call, Constant, constant, refuse


@operator("Shape", "Size")
def shape(call: Call) -> Tensor:
    """Stand in the table; sizes are computed before tensors are (:mod:`compressor.capture.onnx_in.sizes`)."""
    raise AssertionError(call.op)


@operator("Constant")
def constant_value(call: Call) -> Tensor | Constant:
    """Return the attribute's value."""
    (name, value), *_ = call.attributes.items()
    if name == "value":
        assert isinstance(value, Constant)
        return value
    if name in ("value_float", "value_floats", "value_int", "value_ints"):
        return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
    raise refuse(f"constants of the kind {name!r} are not read")


@operator("Reshape")
def reshape(call: Call) -> Tensor:
    """Give another shape; 0 keeps a size, unless ``allowzero``."""
    x, sizes = call.tensor(0), call.numbers(1, "the sizes")
    if not call.get("allowzero", 0):
        sizes = [x.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(sizes)]
    return torch.reshape(x, sizes)


@operator("Flatten")
def flatten(call: Call) -> Tensor:
    """Give the shape of a matrix."""
    x, axis = call.tensor(0), call.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == x.dim() - 1 == 1:
        return x
    rows: Any = 1
    for size in x.shape[:axis]:
        rows = rows * size
    columns: Any = 1
    for size in x.shape[axis:]:
        columns = columns * size
    return torch.reshape(x, (rows, columns))


@operator("Transpose")
def transpose(call: Call) -> Tensor:
    """Permute dimensions."""
    x = call.tensor(0)
    return x.permute(call.get("perm", list(range(x.dim()))[::-1]))


@operator("Squeeze")
def squeeze(call: Call) -> Tensor:
    """Drop dimensions of one element."""
    x, axes = call.tensor(0), call.axes(1)
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return torch.squeeze(x, tuple(axes))


@operator("Unsqueeze")
def unsqueeze(call: Call) -> Tensor:
    """Insert dimensions of one element."""
    x, axes = call.tensor(0), call.axes(1)
    assert axes is not None
    dims = x.dim() + len(axes)
    if len({axis % dims for axis in axes}) != len(axes):
        raise refuse(f"its axes {axes} name one dimension twice")
    for axis in sorted(axis % dims for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Expand")
def expand(call: Call) -> Tensor:
    """Broadcast to a shape, in both directions."""
    x, sizes = call.tensor(0), call.numbers(1, "the sizes")
    held = [1] * (len(sizes) - x.dim()) + list(x.shape)
    wanted = [1] * (len(held) - len(sizes)) + sizes
    return x.expand([b if isinstance(a, int) and a == 1 else a for a, b in zip(held, wanted, strict=True)])


@operator("Tile")
def tile(call: Call) -> Tensor:
    """Repeat along each dimension."""
    return call.tensor(0).repeat(call.numbers(1, "the repeats"))


@operator("Concat")
def concat(call: Call) -> Tensor:
    """Concatenate."""
    return torch.cat(call.tensors(), dim=call.get("axis"))


@operator("Split")
def split(call: Call) -> tuple[Tensor, ...]:
    """Split into parts of given sizes, or into equal ones of which the last may be smaller."""
    x, axis = call.tensor(0), call.get("axis", 0)
    if call.has(1):
        return tuple(torch.split(x, call.numbers(1, "the sizes"), dim=axis))
    count = call.get("num_outputs", call.outputs)
    size = x.shape[axis]
    part = (size + count - 1) // count
    return tuple(torch.split(x, [part] * (count - 1) + [size - part * (count - 1)], dim=axis))


@operator("Slice")
def slices(call: Call) -> Tensor:
    """Take parts of dimensions; backwards by an index."""
    x = call.tensor(0)
    starts, ends = call.numbers(1, "the starts"), call.numbers(2, "the ends")
    axes = call.numbers(3, "the axes") if call.has(3) else list(range(len(starts)))
    steps = call.numbers(4, "the steps") if call.has(4) else [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = x.shape[axis]
        if step < 0:
            if not all(isinstance(n, int) for n in (size, start, end)):
                raise refuse("it goes backwards over a size that varies")
            whole = range(size)[slice(start, None if end < -size else end, step)]
            x = x.index_select(axis, constant(list(whole), torch.int64))
        else:
            x = _part(x, axis, start, end, step)
    return x


def _part(x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    end = min(end, 2**63 - 1) if isinstance(end, int) else end
    part: Tensor = torch.ops.aten.slice.Tensor(x, axis % x.dim(), start, end, step)
    return part


@operator("Pad")
def pad(call: Call) -> Tensor:
    """Pad with a constant, reflected, by the edge, or around; negative pads crop."""
    x, pads, mode = call.tensor(0), call.numbers(1, "the pads"), call.get("mode", "constant")
    axes = call.numbers(3, "the axes") if call.has(3) else list(range(x.dim()))
    count = len(axes)
    if mode == "constant":
        value = call.number(2, "the value") if call.has(2) else 0
        amounts: list[Any] = [0, 0] * x.dim()
        for i, axis in enumerate(axes):
            at = 2 * (x.dim() - 1 - axis % x.dim())
            amounts[at : at + 2] = [pads[i], pads[i + count]]
        if not any(isinstance(n, int) and n == 0 for n in amounts) or any(amounts):
            while len(amounts) > 2 and amounts[-1] == 0 and amounts[-2] == 0:
                amounts = amounts[:-2]
            return F.pad(x, amounts, value=value)
        return x
    for i, axis in enumerate(axes):
        x = _pad_by_index(x, axis % x.dim(), pads[i], pads[i + count], mode)
    return x


def _pad_by_index(x: Tensor, axis: int, before: Any, after: Any, mode: str) -> Tensor:
    size = x.shape[axis]
    if isinstance(before, int) and isinstance(after, int) and before == 0 and after == 0:
        return x
    if not all(isinstance(n, int) for n in (size, before, after)):
        raise refuse(f"it pads ({mode}) a size that varies")
    if size == 0:
        raise refuse(f"it pads ({mode}) a dimension without elements")
    places = range(-before, size + after)
    if mode == "edge":
        index = [min(max(i, 0), size - 1) for i in places]
    elif mode == "wrap":
        index = [i % size for i in places]
    elif mode == "reflect":
        period = max(2 * size - 2, 1)
        index = [min(i % period, period - i % period) if size > 1 else 0 for i in places]
    else:
        raise refuse(f"mode {mode!r} is not read")
    return x.index_select(axis, constant(index, torch.int64))


@operator("CenterCropPad")
def center_crop_pad(call: Call) -> Tensor:
    """Crop or pad evenly on both sides."""
    x, sizes = call.tensor(0), call.numbers(1, "the sizes")
    axes = call.get("axes", list(range(x.dim())))
    for axis, wanted in zip(axes, sizes, strict=True):
        size = x.shape[axis]
        if not (isinstance(size, int) and isinstance(wanted, int)):
            raise refuse("it crops or pads a size that varies")
        if wanted < size:
            x = x.narrow(axis, (size - wanted) // 2, wanted)
        elif wanted > size:
            before = (wanted - size) // 2
            at = 2 * (x.dim() - 1 - axis % x.dim())
            x = F.pad(x, [0] * at + [before, wanted - size - before])
    return x


@operator("ConstantOfShape")
def constant_of_shape(call: Call) -> Tensor:
    """Fill a tensor with one value."""
    value = call.get("value")
    fill, dtype = (0.0, torch.float32) if value is None else (value.number, value.value.dtype)
    return torch.full(call.numbers(0, "the sizes"), fill, dtype=dtype)


@operator("Range")
def arange(call: Call) -> Tensor:
    """Count from a start to a limit."""
    start, limit, step = (call.number(i, "its ends") for i in range(3))
    x = call.inputs[0]
    dtype = x.value.dtype if isinstance(x, Constant) else call.tensor(0).dtype
    return torch.arange(start, limit, step, dtype=dtype)


@operator("EyeLike")
def eye_like(call: Call) -> Tensor:
    """Return ones on a diagonal."""
    x, k = call.tensor(0), call.get("k", 0)
    rows, columns = x.shape
    dtype = DTYPES[call.get("dtype")] if call.get("dtype") else x.dtype
    return convert(torch.arange(columns) - torch.arange(rows).unsqueeze(1) == k, dtype)


@operator("DepthToSpace")
def depth_to_space(call: Call) -> Tensor:
    """Move channels into blocks of height and width."""
    x, b = call.tensor(0), call.get("blocksize")
    n, c, h, w = x.shape
    if call.get("mode", "DCR") == "CRD":
        return x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // b**2, h * b, w * b)
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(call: Call) -> Tensor:
    """Move blocks of height and width into channels."""
    x, b = call.tensor(0), call.get("blocksize")
    n, c, h, w = x.shape
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b**2, h // b, w // b)


@operator("Trilu")
def trilu(call: Call) -> Tensor:
    """Keep an upper or lower triangle."""
    x = call.tensor(0)
    k = call.number(1, "its diagonal") if call.has(1) else 0
    return torch.triu(x, k) if call.get("upper", 1) else torch.tril(x, k)


@operator("HannWindow", "HammingWindow", "BlackmanWindow")
def window(call: Call) -> Tensor:
    """Return a window of a signal."""
    size, dtype = call.number(0, "its size"), DTYPES[call.get("output_datatype", 1)]
    if not isinstance(size, int):
        raise refuse("its size varies")
    steps = torch.arange(size, dtype=torch.float64) * (2 * torch.pi / (size if call.get("periodic", 1) else size - 1))
    if call.op == "HannWindow":
        return (0.5 - 0.5 * torch.cos(steps)).to(dtype)
    if call.op == "HammingWindow":
        return (25 / 46 - 21 / 46 * torch.cos(steps)).to(dtype)
    return (0.42 - 0.5 * torch.cos(steps) + 0.08 * torch.cos(2 * steps)).to(dtype)
