"""Emit weights and the activations that they are multiplied by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compressor.export.exchange.coded import coded
from compressor.export.exchange.dense_form import base_name
from compressor.export.onnx_out.codes import FLOATS, Blocks, has_one_scale, in_bytes, row_scales, signed
from compressor.export.onnx_out.emitter import MICROSOFT, Emitter, as_array
from compressor.export.onnx_out.rules import refuse
from compressor.formats.activations import Activations
from compressor.formats.packing import PackedWeight, dequantize
from compressor.formats.rounded_activations import SMALLEST
from compressor.graph.rewrite import held_tensor

_POSITIVE = ("aten::relu", "aten::sigmoid", "aten::softmax", "aten::exp", "aten::abs")
_MOVED = ("aten::permute", "aten::max_pool2d", "aten::view", "aten::reshape", "aten::pad", "aten::contiguous")


def weight_name(node: Node) -> str:
    """Return the name by which a packed weight is counted."""
    return f"{base_name(node)}.weight"


def in_blocks(e: Emitter, node: Node, packed: PackedWeight, flat: bool) -> list[str]:
    """Store a weight in blocks; the names of codes, scales and zero points, if there are any.

    Args:
        flat: codes of a row lie side by side, and not block by block.
    """
    base, blocks = base_name(node), Blocks(packed)
    width = blocks.size * blocks.bits // 8
    codes = e.tensor(f"{base}.codes", "UINT8", (blocks.rows, blocks.count * width), blocks.codes)
    scales = e.tensor(f"{base}.scales", "FLOAT16", (blocks.rows, blocks.count), blocks.scales)
    if (key := ("in blocks", base)) not in e.memo:
        e.memo[key] = e.cast(scales, torch.float32)
        size = blocks.rows * blocks.count * (width + 2)
        if not packed.format.symmetric:
            columns = -(-blocks.count * blocks.bits // 8)
            e.memo[base, "zeros"] = e.tensor(f"{base}.zeros", "UINT8", (blocks.rows, columns), blocks.zeros)
            size += blocks.rows * columns
        e.count(weight_name(node), size, blocks.rows * blocks.columns)
    if not flat:
        codes = e.add("Reshape", codes, e.constant([blocks.rows, blocks.count, width]))
    zeros = [e.memo[base, "zeros"]] if (base, "zeros") in e.memo else []
    return [codes, e.memo[key], *zeros]


def product(e: Emitter, node: Node, x: str, packed: PackedWeight) -> str:
    """Multiply floats by a weight in blocks, or of floats of 8 bits, ``x @ W.T``."""
    if packed.format.element is not None:
        return e.add("MatMul", x, e.add("DequantizeLinear", *row_scaled(e, node, packed), axis=1))
    if e.standard:
        return e.add("MatMul", x, _dequantized(e, node, packed))
    blocks = Blocks(packed)
    sizes = {"K": blocks.columns, "N": blocks.rows, "bits": blocks.bits, "block_size": blocks.size}
    more = {"accuracy_level": e.accuracy} if e.accuracy else {}
    return e.add("MatMulNBits", x, *in_blocks(e, node, packed, False), domain=MICROSOFT, **sizes, **more)


def _dequantized(e: Emitter, node: Node, packed: PackedWeight) -> str:
    """Emit a weight [in, out] by DequantizeLinear."""
    base, fmt, (rows, columns) = base_name(node), packed.format, packed.shape
    blocks, narrow = Blocks(packed), fmt.bits <= 4
    if e.opset < 21:
        raise refuse(node, f"scales of blocks take opset 21 without ONNX Runtime's operators, and this is {e.opset}")
    kind = ("" if fmt.symmetric else "U") + ("INT4" if narrow else "INT8")

    def codes() -> Any:
        found = signed(packed).view(torch.uint8) if fmt.symmetric else coded(packed).codes
        return _halves(found.t().contiguous()) if narrow else found.t().contiguous().numpy()

    def zeros() -> Any:
        held = coded(packed).zeros
        assert held is not None
        by_block = blocks.by_block(held).t().contiguous()
        return _halves(by_block) if narrow else by_block.numpy()

    width = 0.5 if narrow else 1
    names = [e.tensor(f"{base}.codes", kind, (columns, rows), codes)]
    scales = e.tensor(f"{base}.scales", "FLOAT16", (blocks.count, rows), lambda: blocks.scales().T)
    names.append(e.cast(scales, torch.float32))
    if not fmt.symmetric:
        names.append(e.tensor(f"{base}.zeros", kind, (blocks.count, rows), zeros))
    size = int(rows * columns * width + rows * blocks.count * (2 + (0 if fmt.symmetric else width)))
    e.count(weight_name(node), size, rows * columns)
    return e.add("DequantizeLinear", *names, axis=0, block_size=blocks.size)


def _halves(codes: Tensor) -> Any:
    """Pack 4-bit numbers of any shape two a byte."""
    flat = torch.nn.functional.pad(codes.reshape(1, -1) & 15, (0, codes.numel() % 2))
    return in_bytes(flat, 4)


def row_scaled(e: Emitter, node: Node, packed: PackedWeight, kernel: tuple[int, ...] = ()) -> tuple[str, str]:
    """Store codes of a weight with one scale a row, int8 or floats of 8 bits; the names of these and of scales, float32
    [out].

    Args:
        kernel: of a convolution, whose codes become [out, in, *kernel]; otherwise they are [in, out].
    """
    base, (rows, columns) = base_name(node), packed.shape
    shape: tuple[int, ...] = (columns, rows)
    if kernel:
        shape = (rows, columns // (kernel[0] * kernel[1]), *kernel)
    element = packed.format.element
    if element is not None and e.opset < 19:
        raise refuse(node, f"floats of 8 bits take opset 19, and this is {e.opset}")
    kind = "INT8" if element is None else FLOATS[element.name]

    def codes_of() -> Any:
        return as_array(placed(signed(packed) if element is None else coded(packed).codes, kernel))

    codes = e.tensor(f"{base}.codes", kind, shape, codes_of)
    scales = e.tensor(f"{base}.scales", "FLOAT", (rows,), lambda: row_scales(packed))
    e.count(weight_name(node), rows * columns + 4 * rows, rows * columns)
    return codes, scales


def placed(weight: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Return a weight [out, in] as [in, out], or [out, rows * columns * in] as ONNX's convolutions have it."""
    if not kernel:
        return weight.t()
    return weight.reshape(len(weight), *kernel, -1).permute(0, 3, 1, 2)


def dense_weight(e: Emitter, node: Node, weight: Node, kernel: tuple[int, ...] = ()) -> str:
    """Emit a dense weight in the order of :func:`placed`, float32; stored so, where nothing else reads it."""
    name = str(weight.target)
    if weight.op != "get_attr":
        if kernel:
            raise refuse(node, "the weight of a convolution is computed")
        return e.add("Transpose", e.of(weight), perm=[1, 0])
    held = held_tensor(e.graph, name).detach()
    readers = [u for n in e.graph.graph.find_nodes(op="get_attr") if n.target == name for u in n.users]
    if not kernel and any(reader.target != node.target for reader in readers):
        return e.add("Transpose", e.of(weight, torch.empty(0, device="meta")), perm=[1, 0])
    kinds = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
    turned = placed(torch.empty(held.shape, device="meta"), kernel)
    stored = e.tensor(name, kinds[held.dtype], turned.shape, lambda: as_array(placed(held, kernel)))
    e.count(name, held.numel() * held.element_size(), held.numel())
    return stored if held.dtype == torch.float32 else e.cast(stored, torch.float32)


def dequantized_weight(e: Emitter, node: Node, packed: PackedWeight, kernel: tuple[int, ...] = ()) -> str:
    """Store a packed weight as floats, by request."""
    name, count = weight_name(node), packed.shape[0] * packed.shape[1]
    shape = placed(torch.empty(packed.shape, device="meta"), kernel).shape
    e.count(name, 4 * count, count)
    return e.tensor(name, "FLOAT", shape, lambda: as_array(placed(dequantize(packed), kernel)))


def token_codes(e: Emitter, x: str, act: Activations) -> tuple[str, str]:
    """Emit activations in whole steps of a scale of each row: floats [..., in], and scales float32 [..., 1]."""
    key = "codes", x, act
    if key not in e.memo:
        largest, zero = e.constant(act.max_value, "float32"), e.constant(0.0, "float32")
        sizes = e.add("ReduceMax", e.add("Abs", x), e.constant([-1]), keepdims=1)
        scale = e.add("Div", sizes, largest)
        inverse = e.add("Div", e.constant(1.0, "float32"), scale)
        counts = e.add("Greater", scale, e.constant(SMALLEST, "float32"))
        scaled = e.add("Mul", x, e.add("Where", counts, inverse, zero))
        lowest = e.constant(-act.max_value, "float32")
        e.memo[key] = e.add("Round", e.add("Clip", scaled, lowest, largest)), scale
    found: tuple[str, str] = e.memo[key]
    return found


def static_quantized(e: Emitter, node: Node, x: str, act: Activations, source: Node) -> str:
    """Emit QuantizeLinear and DequantizeLinear by the stored scale; limits where -128 could come out."""
    base = base_name(node)
    held = e.graph.get_parameter(f"{base}.input_scale").detach()
    scale = e.tensor(f"{base}.input_scale", "FLOAT", (), lambda: as_array(held.reshape(())))
    zero = e.constant(0, "int8")
    if not (act.bits == 8 and is_nonnegative(source)):
        limit = e.constant(act.max_value, "float32")
        bound = e.add("Mul", scale, limit)
        x = e.add("Clip", x, e.add("Neg", bound), bound)
    return e.add("DequantizeLinear", e.add("QuantizeLinear", x, scale, zero), scale, zero)


def rounded(e: Emitter, node: Node, x: str, packed: PackedWeight, source: Node) -> str:
    """Emit activations as the format rounds them."""
    act = packed.format.activations
    if act is None:
        return x
    if act.granularity == "tensor":
        return static_quantized(e, node, x, act, source)
    if not act.group_size:
        codes, scale = token_codes(e, x, act)
        return e.add("Mul", codes, scale)
    kept = [0] * (source.meta["val"].dim() - 1)
    grouped = e.add("Reshape", x, e.constant([*kept, packed.shape[1] // act.group_size, act.group_size]))
    codes, scale = token_codes(e, grouped, act)
    return e.add("Reshape", e.add("Mul", codes, scale), e.constant([*kept, packed.shape[1]]))


def multiplies_integers(packed: PackedWeight) -> bool:
    """Return whether activations and weights are integers with one scale a row each."""
    act = packed.format.activations
    return act is not None and not act.group_size and has_one_scale(packed.format) and packed.format.bits > 4


def is_nonnegative(node: Any) -> bool:
    """Return whether a value is known not to be below zero."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name == "aten::hardtanh":
        return bool(node.args[1] >= 0)
    return name in _POSITIVE or (name in _MOVED and is_nonnegative(node.args[0]))
