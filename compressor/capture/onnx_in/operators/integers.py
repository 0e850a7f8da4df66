"""Quantised values: read exactly as dense ones, or computed in the integers that they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressor.capture.onnx_in.operators.elementwise import convert
from compressor.capture.onnx_in.operators.products import convolve
from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.stored import DTYPES, NARROW
from compressor.capture.onnx_in.values import Call, Constant, refuse


def _spread(values: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Give scales or zero points, one a tensor, an index of an axis, or a block of it, the shape of x."""
    if values.numel() == 1 and values.dim() <= 1:
        return values.reshape(())
    axis = axis % x.dim()
    if block:
        return values.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if values.dim() != 1:
        raise refuse(f"its scale has {values.dim()} dimensions, and no block size")
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.reshape(shape)


@operator("DequantizeLinear")
def dequantize(call: Call) -> Tensor:
    """Return ``(x - zero point) * scale``, in the scale's type."""
    x, scale = call.tensor(0), call.tensor(1)
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    dtype = DTYPES.get(call.get("output_dtype", 0), scale.dtype)
    whole = x.to(torch.float32)
    if x.dtype == torch.int32:
        whole = x.to(torch.float64)
    if call.has(2):
        zeros = _spread(call.tensor(2), x, axis, block)
        whole = whole - zeros.to(whole.dtype)
    wide = scale.to(whole.dtype)
    return (whole * _spread(wide, x, axis, block)).to(dtype)


@operator("QuantizeLinear")
def quantize(call: Call) -> Tensor:
    """Return ``round(x / scale) + zero point``, saturated."""
    x, scale = call.tensor(0), call.tensor(1)
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    zero = call.inputs[2] if call.has(2) else None
    if (isinstance(zero, Constant) and zero.narrow) or call.get("output_dtype", 0) in NARROW:
        raise refuse("it makes elements of less than a byte")
    dtype = call.tensor(2).dtype if zero is not None else DTYPES.get(call.get("output_dtype", 0) or 2)
    if dtype is None:
        raise refuse(f"it makes elements of type {call.get('output_dtype')}")
    if call.get("precision", 0):
        x, scale = x.to(DTYPES[call.get("precision")]), scale.to(DTYPES[call.get("precision")])
    scaled = x / _spread(scale, x, axis, block)
    if dtype.is_floating_point:
        return convert(scaled, dtype, bool(call.get("saturate", 1)))
    codes = torch.round(scaled).to(torch.float64 if dtype.itemsize > 2 else torch.float32)
    if zero is not None:
        codes = codes + _spread(call.tensor(2), x, axis, block).to(codes.dtype)
    return _saturated(codes, dtype)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    ends = torch.iinfo(dtype)
    return convert(torch.clamp(x, ends.min, ends.max), dtype)


@operator("DynamicQuantizeLinear")
def dynamic_quantize(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes by the range of the tensor, which takes in 0, with their scale and zero point."""
    x = call.tensor(0)
    zero = torch.zeros([], dtype=x.dtype)
    low, high = torch.minimum(torch.amin(x), zero), torch.maximum(torch.amax(x), zero)
    scale = (high - low) / 255
    point = torch.clamp(torch.round(-low / scale), 0, 255)
    codes = torch.clamp(torch.round(x / scale) + point, 0, 255)
    return codes.to(torch.uint8), scale, point.to(torch.uint8)


def _shifted(x: Tensor, zero: Tensor | None, rows: bool = False) -> Tensor:
    """Subtract a zero point in float64, where products of codes are exact; ``rows`` where it is one a row."""
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    held = zero.to(torch.float64)
    return wide - (held.unsqueeze(-1) if rows and held.dim() else held)


@operator("MatMulInteger")
def matmul_integer(call: Call) -> Tensor:
    """Multiply matrices of codes, to int32."""
    a, b = _shifted(call.tensor(0), call.maybe(2), rows=True), _shifted(call.tensor(1), call.maybe(3))
    return torch.matmul(a, b).to(torch.int32)


@operator("ConvInteger")
def conv_integer(call: Call) -> Tensor:
    """Convolve codes, to int32."""
    weight = call.tensor(1)
    return convolve(call, _shifted(call.tensor(0), call.maybe(2)), _filters(weight, call.maybe(3)), None).to(
        torch.int32
    )


def _filters(weight: Tensor, zero: Tensor | None) -> Tensor:
    if zero is None or zero.numel() == 1:
        return _shifted(weight, None if zero is None else zero.reshape(()))
    return _shifted(weight, zero.reshape([-1] + [1] * (weight.dim() - 1)))


@operator("QLinearMatMul")
def qlinear_matmul(call: Call) -> Tensor:
    """Multiply matrices of codes, and round the product to codes."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = (call.tensor(i) for i in range(8))
    product = torch.matmul(_shifted(a, a_zero, rows=True), _shifted(b, b_zero))
    left = a_scale.unsqueeze(-1) if a_scale.dim() else a_scale
    factor = left.double() * b_scale.double() / scale.double()
    return _saturated(torch.round(product * factor) + zero.double(), zero.dtype)


@operator("QLinearConv")
def qlinear_conv(call: Call) -> Tensor:
    """Convolve codes, and round the sums to codes."""
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero = (call.tensor(i) for i in range(8))
    bias = call.maybe(8)
    wide = convolve(call, _shifted(x, x_zero), _filters(w, w_zero), None if bias is None else bias.double())
    factor = x_scale.double() * w_scale.double() / scale.double()
    factor = factor if factor.numel() == 1 else factor.reshape([1, -1] + [1] * (x.dim() - 2))
    return _saturated(torch.round(wide * factor) + zero.double(), zero.dtype)


@operator("MatMulNBits")
def matmul_nbits(call: Call) -> Tensor:
    """Multiply by a matrix stored in blocks of few bits (com.microsoft), read as a dense one [N, K]."""
    rows, columns, bits, block = (call.get(name) for name in ("N", "K", "bits", "block_size"))
    bits = 4 if bits is None else bits
    if bits not in (2, 4, 8):
        raise refuse(f"codes of {bits} bits are not read")
    if call.has(4):
        raise refuse("its columns are in another order (g_idx)")
    if not isinstance(call.inputs[1], Constant):
        raise refuse("its weight is computed, not stored")
    weight = nbits_weight(call, rows, columns, bits, block)
    return torch.nn.functional.linear(call.tensor(0), weight, call.maybe(5))


def nbits_weight(call: Call, rows: int, columns: int, bits: int, block: int) -> Tensor:
    """Return the dense matrix [rows, columns] of a MatMulNBits: codes from the low bits of each byte on."""
    codes, scales = call.tensor(1), call.tensor(2)
    blocks = -(-columns // block)
    whole = _unpacked(codes.reshape(rows, blocks, -1), bits).to(torch.float32)
    zero: Any = float(1 << (bits - 1))
    if call.has(3):
        held = call.tensor(3)
        if held.is_floating_point():
            zero = held.reshape(rows, blocks, 1).to(torch.float32)
        else:
            zero = _unpacked(held.reshape(rows, -1), bits)[:, :blocks].unsqueeze(-1).to(torch.float32)
    dense = (whole - zero) * scales.reshape(rows, blocks, 1).to(torch.float32)
    cut: Tensor = dense.reshape(rows, -1)[:, :columns]
    return cut.to(scales.dtype)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """Split bytes [..., n] into codes [..., n * 8 / bits]."""
    parts = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)
