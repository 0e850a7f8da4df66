"""Rules for linears, convolutions and tables, dense and packed.

packed_linear, float activations        MatMulNBits, or DequantizeLinear -> MatMul (floats of 8 bits too)
packed_linear, stored scale             QuantizeLinear -> DequantizeLinear -> MatMul, by DequantizeLinear of int8
packed_linear, a scale for each token   MatMulInteger of int8, times both scales
patches -> linear                       Conv, unless inputs are rounded row by row; then slices -> linear
packed_embedding                        GatherBlockQuantized, or Gather -> DequantizeLinear
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compressor.export.exchange.coded import coded
from compressor.export.exchange.dense_form import base_name, packed_weight
from compressor.export.onnx_out.codes import Blocks, has_one_scale
from compressor.export.onnx_out.emitter import MICROSOFT, Emitter, as_array
from compressor.export.onnx_out.rules import operator_name, rule
from compressor.export.onnx_out.weights import (
    dense_weight,
    dequantized_weight,
    in_blocks,
    multiplies_integers,
    product,
    rounded,
    row_scaled,
    static_quantized,
    token_codes,
    weight_name,
)
from compressor.formats.packing import PackedWeight, dequantize

_LINEARS = ("compressor::dense_linear", "compressor::packed_linear")
_DEPTHWISE = ("compressor::depthwise_linear", "compressor::packed_depthwise")
_FLOAT = torch.empty(0, device="meta")


@rule(*_LINEARS)
def linear(e: Emitter, node: Node, x: Node, weight: Any, bias: Node | None, *_: Any) -> str | None:
    """Emit a linear, dense or packed."""
    if _convolves(e, node, x):
        _convolution(e, node, x, bias)
        return None
    packed = _packed(e, node)
    if packed is None:
        y = e.add("MatMul", e.of(x), _float_weight(e, node))
    elif not multiplies_integers(packed):
        y = product(e, node, rounded(e, node, e.of(x), packed, x), packed)
    else:
        y = _integers(e, node, x, packed)
    return y if bias is None else e.add("Add", y, e.of(bias, _FLOAT))


def _packed(e: Emitter, node: Node) -> PackedWeight | None:
    """Return the packed weight of a node; None if it is dense, or written so."""
    if "packed_" not in operator_name(node) or base_name(node) in e.dense:
        return None
    return packed_weight(e.graph, node)


def _float_weight(e: Emitter, node: Node, kernel: tuple[int, ...] = ()) -> str:
    if "packed_" in operator_name(node):
        return dequantized_weight(e, node, packed_weight(e.graph, node), kernel)
    weight: Any = node.args[1]
    return dense_weight(e, node, weight, kernel)


def _integers(e: Emitter, node: Node, x: Node, packed: PackedWeight) -> str:
    """Emit the product of integers."""
    act = packed.format.activations
    assert act is not None
    codes, scales = row_scaled(e, node, packed)
    if act.granularity == "tensor":
        weight = e.add("DequantizeLinear", codes, scales, axis=1)
        return e.add("MatMul", static_quantized(e, node, e.of(x), act, x), weight)
    steps, scale = token_codes(e, e.of(x), act)
    key = "int8", steps
    if key not in e.memo:
        e.memo[key] = e.cast(steps, torch.int8)
    sums = e.cast(e.add("MatMulInteger", e.memo[key], codes), torch.float32)
    # One by one: ONNX Runtime 1.32 takes the product of both scales for one of the whole tensor, and fuses wrongly.
    return e.add("Mul", e.add("Mul", sums, scales), scale)


def _convolves(e: Emitter, node: Node, x: Node) -> bool:
    """Return whether a linear becomes a Conv: no input is rounded by a scale of its own patch."""
    if operator_name(x) != "compressor::patches" and x not in e.channels_first:
        return False
    packed = _packed(e, node)
    if packed is None:
        return True
    act = packed.format.activations
    return has_one_scale(packed.format) and (act is None or act.granularity == "tensor")


def _convolution(e: Emitter, node: Node, x: Node, bias: Node | None, depthwise: bool = False) -> None:
    read: Any = x.args if operator_name(x) == "compressor::patches" else (x, [1, 1], [1, 1], [0, 0], [1, 1])
    images, kernel, stride, padding, dilation = read
    size = (int(kernel[0]), int(kernel[1]))
    given, packed = _first(e, images), _packed(e, node)
    rows = int(node.meta["val"].shape[-1])
    if packed is None:
        weight = _float_weight(e, node, size)
    else:
        if packed.format.activations is not None:
            given = static_quantized(e, node, given, packed.format.activations, images)
        weight = e.add("DequantizeLinear", *row_scaled(e, node, packed, size), axis=0)
    e.channels_first[node] = e.add(
        "Conv",
        given,
        weight,
        *([] if bias is None else [e.of(bias, _FLOAT)]),
        kernel_shape=list(size),
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
        group=rows if depthwise else 1,
    )


def _first(e: Emitter, images: Any) -> str:
    """Return images with the channels first."""
    if images not in e.channels_first:
        e.channels_first[images] = e.add("Transpose", e.of(images), perm=[0, 3, 1, 2])
    return e.channels_first[images]


@rule("compressor::patches")
def patches(e: Emitter, node: Node, x: Node, kernel: Any, stride: Any, padding: Any, dilation: Any) -> str | None:
    """Emit the inputs of each output as a row; nothing where they are a Conv's."""
    known = (*_LINEARS, *_DEPTHWISE)
    if all(operator_name(user) in known and _convolves(e, user, node) for user in node.users):
        return None
    name = e.of(x)
    if any(padding):
        pads = [0, padding[0], padding[1], 0]
        name = e.add("Pad", name, e.constant(pads + pads), e.constant(0.0, "float32"))
    rows, columns = node.meta["val"].shape[1:3]
    spans = (rows - 1) * stride[0] + 1, (columns - 1) * stride[1] + 1
    steps, axes = e.constant(list(stride)), e.constant([1, 2])
    pieces = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            first = i * dilation[0], j * dilation[1]
            ends = e.constant([first[0] + spans[0], first[1] + spans[1]])
            pieces.append(e.add("Slice", name, e.constant(first), ends, axes, steps))
    return e.add("Concat", *pieces, axis=3) if len(pieces) > 1 else pieces[0]


@rule(*_DEPTHWISE)
def depthwise(e: Emitter, node: Node, x: Node, weight: Any, bias: Node | None, *_: Any) -> str | None:
    """Emit a convolution whose outputs read a channel each."""
    if _convolves(e, node, x):
        _convolution(e, node, x, bias, depthwise=True)
        return None
    packed = _packed(e, node)
    given = e.of(x) if packed is None else rounded(e, node, e.of(x), packed, x)
    if packed is None:
        taps = _float_weight(e, node)
    elif has_one_scale(packed.format):
        taps = e.add("DequantizeLinear", *row_scaled(e, node, packed), axis=1)
    else:
        taps = dequantized_weight(e, node, packed)
    shape = [0] * (x.meta["val"].dim() - 1) + [-1, int(node.meta["val"].shape[-1])]
    products = e.add("Mul", e.add("Reshape", given, e.constant(shape)), taps)
    y = e.add("ReduceSum", products, e.constant([-2]), keepdims=0)
    return y if bias is None else e.add("Add", y, e.of(bias, _FLOAT))


@rule("compressor::packed_embedding")
def packed_embedding(e: Emitter, node: Node, ids: Node, *_: Any) -> str:
    """Emit rows of a packed table."""
    packed = _packed(e, node)
    if packed is None:
        held = packed_weight(e.graph, node)
        name = f"{weight_name(node)}.table"
        count = held.shape[0] * held.shape[1]
        e.count(weight_name(node), 4 * count, count)
        return e.add("Gather", e.tensor(name, "FLOAT", held.shape, lambda: as_array(dequantize(held))), e.of(ids))
    blocks = Blocks(packed)
    if e.standard:
        return _standard_table(e, node, packed, e.of(ids))
    codes, scales, *zeros = in_blocks(e, node, packed, True)
    sizes = {"bits": blocks.bits, "block_size": blocks.size, "gather_axis": 0, "quantize_axis": 1}
    return e.add("GatherBlockQuantized", codes, e.of(ids), scales, *zeros, domain=MICROSOFT, **sizes)


def _standard_table(e: Emitter, node: Node, packed: PackedWeight, ids: str) -> str:
    """Emit rows of codes of 8 bits, and the scales of these rows."""
    base, blocks, (rows, columns) = base_name(node), Blocks(packed), packed.shape
    fmt = packed.format
    codes = e.tensor(f"{base}.table", "UINT8", (rows, columns), lambda: coded(packed).codes.numpy())
    scales = e.tensor(f"{base}.table_scales", "FLOAT16", (rows, blocks.count), blocks.scales)

    def zeros() -> Any:
        return blocks.by_block(coded(packed).zero_points(fmt)).numpy()

    points = e.tensor(f"{base}.table_zeros", "UINT8", (rows, blocks.count), zeros)
    e.count(weight_name(node), rows * (columns + 3 * blocks.count), rows * columns)
    found = [e.add("Gather", name, ids, axis=0) for name in (codes, scales, points)]
    axis = node.meta["val"].dim() - 1
    found[1] = e.cast(found[1], torch.float32)
    return e.add("DequantizeLinear", *found, axis=axis, block_size=blocks.size)
