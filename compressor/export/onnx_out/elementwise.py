"""Rules for what is computed element by element, and for sums and norms over dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compressor.export.onnx_out.emitter import Emitter
from compressor.export.onnx_out.rules import refuse, rule

_UNARY = {
    "aten::relu": "Relu",
    "aten::neg": "Neg",
    "aten::exp": "Exp",
    "aten::log": "Log",
    "aten::sqrt": "Sqrt",
    "aten::tanh": "Tanh",
    "aten::sigmoid": "Sigmoid",
    "aten::sin": "Sin",
    "aten::cos": "Cos",
    "aten::abs": "Abs",
    "aten::erf": "Erf",
    "aten::softplus": "Softplus",
    "aten::hardswish": "HardSwish",
    "aten::reciprocal": "Reciprocal",
}
_BINARY = {"aten::add": "Add", "aten::sub": "Sub", "aten::mul": "Mul", "aten::div": "Div"}
_COMPARED = {"aten::eq": "Equal", "aten::gt": "Greater", "aten::lt": "Less", "aten::ge": "GreaterOrEqual",
             "aten::le": "LessOrEqual"}  # fmt: skip


def each(e: Emitter, node: Node, x: Any, emit: Callable[[str], str]) -> str | None:
    """Emit what is done to each element; images whose channels are first stay so."""
    if x in e.channels_first:
        e.channels_first[node] = emit(e.channels_first[x])
        return None
    return emit(e.of(x))


def _unary(op: str) -> Callable[..., str | None]:
    def emit(e: Emitter, node: Node, x: Node, *_: Any) -> str | None:
        return each(e, node, x, lambda name: e.add(op, name))

    return emit


for _name, _op in _UNARY.items():
    rule(_name)(_unary(_op))


def _binary(op: str) -> Callable[..., str | None]:
    def emit(e: Emitter, node: Node, x: Any, y: Any, *more: Any) -> str | None:
        if more and more[0] not in (None, 1):
            raise refuse(node, f"a factor of {more[0]} on the second argument is not written")
        like = node.meta["val"]
        if not isinstance(like, Tensor):
            return e.add(op, e.size(x), e.size(y))
        turned = [z in e.channels_first for z in (x, y) if isinstance(z, Node)]
        if turned and all(turned):
            names = [e.channels_first[z] if isinstance(z, Node) else e.of(z, like) for z in (x, y)]
            e.channels_first[node] = e.add(op, *names)
            return None
        return e.add(op, e.of(x, like), e.of(y, like))

    return emit


for _name, _op in _BINARY.items():
    rule(_name)(_binary(_op))


def _compared(op: str) -> Callable[..., str]:
    def emit(e: Emitter, _: Node, x: Node, y: Any) -> str:
        return e.add(op, e.of(x), e.of(y, x.meta["val"]))

    return emit


for _name, _op in _COMPARED.items():
    rule(_name)(_compared(_op))


@rule("aten::rsub")
def rsub(e: Emitter, node: Node, x: Node, y: Any, *_: Any) -> str:
    """Emit ``y - x``."""
    like = node.meta["val"]
    return e.add("Sub", e.of(y, like), e.of(x, like))


@rule("aten::silu")
def silu(e: Emitter, node: Node, x: Node) -> str | None:
    """Emit ``x * sigmoid(x)``."""
    return each(e, node, x, lambda name: e.add("Mul", name, e.add("Sigmoid", name)))


@rule("aten::gelu")
def gelu(e: Emitter, node: Node, x: Node, approximate: str = "none") -> str | None:
    """Emit GELU by the error function, or by the hyperbolic tangent."""
    half, one = e.constant(0.5, "float32"), e.constant(1.0, "float32")

    def emit(name: str) -> str:
        if approximate == "tanh":
            cube = e.add("Mul", name, e.add("Mul", name, name))
            inner = e.add("Add", name, e.add("Mul", cube, e.constant(0.044715, "float32")))
            bell = e.add("Tanh", e.add("Mul", inner, e.constant(math.sqrt(2 / math.pi), "float32")))
        else:
            bell = e.add("Erf", e.add("Div", name, e.constant(math.sqrt(2), "float32")))
        return e.add("Mul", e.add("Mul", name, e.add("Add", bell, one)), half)

    return each(e, node, x, emit)


@rule("aten::hardtanh", "aten::clamp", "aten::clamp_min", "aten::clamp_max")
def clamp(e: Emitter, node: Node, x: Node, low: Any = None, high: Any = None) -> str | None:
    """Emit limits; ``clamp_min`` and ``clamp_max`` give one."""
    if str(node.target).startswith("aten.clamp_max"):
        low, high = None, low
    like = node.meta["val"]
    limits = ["" if limit is None else e.of(limit, like) for limit in (low, high)]
    return each(e, node, x, lambda name: e.add("Clip", name, *limits))


@rule("aten::hardsigmoid")
def hardsigmoid(e: Emitter, node: Node, x: Node) -> str | None:
    """Emit ``max(0, min(1, x / 6 + 1 / 2))``."""
    return each(e, node, x, lambda name: e.add("HardSigmoid", name, alpha=1 / 6, beta=0.5))


@rule("aten::leaky_relu")
def leaky_relu(e: Emitter, node: Node, x: Node, slope: float) -> str | None:
    """Emit a slope below zero."""
    return each(e, node, x, lambda name: e.add("LeakyRelu", name, alpha=float(slope)))


@rule("aten::pow")
def power(e: Emitter, node: Node, x: Any, exponent: Any) -> str:
    """Emit powers."""
    like = node.meta["val"]
    return e.add("Pow", e.of(x, like), e.of(exponent, like))


@rule("aten::rsqrt")
def rsqrt(e: Emitter, node: Node, x: Node) -> str | None:
    """Emit one over the square root."""
    return each(e, node, x, lambda name: e.add("Reciprocal", e.add("Sqrt", name)))


@rule("aten::where")
def where(e: Emitter, node: Node, condition: Node, x: Any, y: Any) -> str:
    """Emit a choice."""
    like = node.meta["val"]
    return e.add("Where", e.of(condition), e.of(x, like), e.of(y, like))


@rule("aten::masked_fill")
def masked_fill(e: Emitter, node: Node, x: Node, mask: Node, value: Any) -> str:
    """Emit a number where a mask is set."""
    return e.add("Where", e.of(mask), e.of(value, node.meta["val"]), e.of(x))


@rule("aten::to", "aten::_to_copy")
def to(e: Emitter, node: Node, x: Node, *_: Any) -> str | None:
    """Emit a conversion, if there is one."""
    return e.of(x, node.meta["val"])


@rule("aten::softmax", "aten::_softmax")
def softmax(e: Emitter, _: Node, x: Node, axis: int, *__: Any) -> str:
    """Emit exponentials over their sum."""
    return e.add("Softmax", e.of(x), axis=axis)


@rule("aten::mean", "aten::sum", "aten::amax")
def reduced(e: Emitter, node: Node, x: Node, axes: Any = None, keep: bool = False, *_: Any) -> str | None:
    """Emit a mean, sum or maximum over dimensions."""
    op = {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax"}[str(node.target).split(".")[1]]
    rank = x.meta["val"].dim()
    chosen = list(range(rank)) if not axes else sorted(axis % rank for axis in axes)
    if keep and chosen == [1, 2] and x in e.channels_first:
        e.channels_first[node] = e.add(op, e.channels_first[x], e.constant([2, 3]), keepdims=1)
        return None
    return e.add(op, e.of(x), e.constant(chosen), keepdims=int(keep))


@rule("aten::layer_norm")
def layer_norm(e: Emitter, node: Node, x: Node, shape: Any, weight: Any, bias: Any, eps: float, *_: Any) -> str:
    """Emit a layer norm over the last dimensions."""
    like = torch.empty(0, device="meta")
    gain = e.constant([1.0] * int(shape[-1]), "float32") if weight is None else e.of(weight, like)
    if weight is None and len(shape) > 1:
        raise refuse(node, "a norm over several dimensions without a weight is not written")
    shift = [] if bias is None else [e.of(bias, like)]
    return e.add("LayerNormalization", e.of(x), gain, *shift, axis=-len(shape), epsilon=float(eps))


@rule("compressor::rms_norm")
def rms_norm(e: Emitter, _: Node, x: Node, weight: Node, eps: float) -> str:
    """Emit ``x / sqrt(mean(x ** 2) + eps) * weight``, which ONNX Runtime makes one kernel of."""
    given = e.of(x)
    square = e.add("Pow", given, e.constant(2.0, "float32"))
    mean = e.add("ReduceMean", square, e.constant([-1]), keepdims=1)
    root = e.add("Sqrt", e.add("Add", mean, e.constant(eps, "float32")))
    return e.add("Mul", e.add("Div", given, root), e.of(weight, torch.empty(0, device="meta")))
