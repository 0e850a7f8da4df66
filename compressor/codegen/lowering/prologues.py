"""Rules that compute what is in front of packed linears where their kernel prepares activations.

    norm -> linears                    becomes      fused_linear(x, prologue=norm)
    silu, gelu or relu -> linears      becomes      fused_linear(x, prologue=silu)
    silu(gate) * up -> linears         becomes      fused_linear(gate, up, prologue=silu_mul)

Computed there, the result is never stored for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compressor.codegen.kernels.linear.prologue import Kind, Prologue
from compressor.codegen.lowering.fused_linear import LINEAR, alike, fused_linear, kernel
from compressor.formats.format import Format
from compressor.graph.rules import why_not

_OPS, _ATEN = torch.ops.compressor, torch.ops.aten
_ACTIVATIONS: dict[Any, Kind] = {
    _ATEN.silu.default: "silu",
    _ATEN.gelu.default: "gelu",
    _ATEN.relu.default: "relu",
}
_NORMS: dict[Any, Kind] = {_OPS.rms_norm.default: "rms_norm", _ATEN.layer_norm.default: "layer_norm"}


class NormIntoLinears:
    """A norm is computed where the kernel behind it prepares activations."""

    name = "norm into linears"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a kernel's node and the norm that it reads."""
        x = _input(node)
        return (node, x) if x is not None and x.target in _NORMS else None

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for a norm of channels that has a weight and no other reader."""
        node, norm = match
        _, shape, weight, _, _ = _norm_arguments(norm)
        return _why_no_prologue(node, norm) or why_not(
            (len(shape) != 1, f"the norm is over {len(shape)} dimensions, not over the channels alone"),
            (weight is None, "the norm has no weight"),
        )

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Give the kernel the norm's input, weight and bias."""
        node, norm = match
        source, _, weight, bias, eps = _norm_arguments(norm)
        vectors = [weight] if bias is None else [weight, bias]
        prologue = Prologue(_NORMS[norm.target], eps=eps, has_bias=bias is not None)
        return _with_prologue(graph, node, [source], vectors, prologue, [norm])


class ActivationIntoLinears:
    """An activation function is computed where the kernel behind it prepares activations."""

    name = "activation into linears"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Match a kernel's node and the activation function that it reads."""
        x = _input(node)
        return (node, x) if x is not None and x.target in _ACTIVATIONS else None

    def check(self, match: tuple[fx.Node, fx.Node]) -> str:
        """Ask for a function of float32 that has no other reader."""
        node, activation = match
        return _why_no_prologue(node, activation) or _why_not_float32(activation)

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, fx.Node]) -> fx.Node:
        """Give the kernel the function's input."""
        node, activation = match
        return _with_prologue(graph, node, [activation.args[0]], [], Prologue(_kind(activation)), [activation])


class ProductIntoLinears:
    """An activation function times a factor (SwiGLU, GeGLU) is computed where the kernel prepares activations."""

    name = "gated activation into linears"

    def pattern(self, node: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, Any]]] | None:
        """Match a kernel's node and, of the product that it reads, each activation function with the other factor."""
        x = _input(node)
        if x is None or x.target is not _ATEN.mul.Tensor:
            return None
        pairs: list[Any] = [x.args, x.args[::-1]]
        gated = [(f, other) for f, other in pairs if isinstance(f, fx.Node) and f.target in _ACTIVATIONS]
        return (node, gated) if gated else None

    def check(self, match: tuple[fx.Node, list[tuple[fx.Node, Any]]]) -> str:
        """Ask for a product and an activation function that have no other readers, and factors of one shape."""
        node, gated = match
        x = _input(node)
        assert x is not None
        reasons = [_why_not_gated(*pair) for pair in gated]
        return _why_no_prologue(node, x) or ("" if "" in reasons else reasons[0])

    def rewrite(self, graph: fx.Graph, match: tuple[fx.Node, list[tuple[fx.Node, Any]]]) -> fx.Node:
        """Give the kernel the function's input and the other factor."""
        node, gated = match
        x = _input(node)
        assert x is not None
        activation, other = next(pair for pair in gated if not _why_not_gated(*pair))
        prologue = Prologue(_kind(activation), gated=True)
        return _with_prologue(graph, node, [activation.args[0], other], [], prologue, [x, activation])


def _with_prologue(
    graph: fx.Graph,
    node: fx.Node,
    inputs: list[Any],
    vectors: list[Any],
    prologue: Prologue,
    covered: Sequence[fx.Node],
) -> fx.Node:
    """Let a kernel compute ``covered``, the last first, from ``inputs``."""
    call = node if node.target is fused_linear else kernel(graph, [node])
    call.args = (inputs, vectors, *call.args[2:4], prologue, *call.args[5:])  # type: ignore[arg-type]
    for old in covered:
        graph.erase_node(old)
    return call


def _input(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a packed linear or a kernel without prologue reads; None of other nodes."""
    args: Any = node.args
    if node.target is LINEAR:
        x = args[0]
    elif node.target is fused_linear and args[4] is None:
        x = args[0][0]
    else:
        return None
    return x if isinstance(x, fx.Node) else None


def _why_no_prologue(node: fx.Node, x: fx.Node) -> str:
    """Return why a kernel cannot compute its input x itself; empty if it can."""
    fmt = Format.parse(str(node.args[3] if node.target is LINEAR else node.args[5]))
    others = [user.name for user in x.users if user is not node]
    return why_not(
        (bool(others), f"{x.name} is also read by {', '.join(others)}"),
        (bool(fmt.outlier_percent), "weights in float16 read the activations a second time"),
        (bool(fmt.outlier_features), "columns in float16 read the activations a second time"),
    )


def _why_not_gated(activation: fx.Node, other: Any) -> str:
    """Return why an activation function and its factor are not computed by a kernel; empty if they are."""
    return why_not(
        (bool(reason := _why_not_float32(activation)), reason),
        (len(activation.users) > 1, f"{activation.name} has other readers than the product"),
        (not alike(activation, other), "the factors are not float32 tensors of one shape"),
    )


def _why_not_float32(activation: fx.Node) -> str:
    return "" if alike(activation, activation.args[0]) else f"{activation.name} is not computed in float32"


def _kind(activation: fx.Node) -> Kind:
    kind = _ACTIVATIONS[activation.target]
    return "gelu_tanh" if activation.kwargs.get("approximate", "none") == "tanh" else kind


def _norm_arguments(norm: fx.Node) -> tuple[Any, Any, Any, Any, Any]:
    """Return input, normalised shape, weight, bias and epsilon of a norm."""
    args: Any = norm.args
    if norm.target is _OPS.rms_norm.default:
        x, weight, eps = args
        return x, weight.meta["val"].shape, weight, None, eps
    x, shape, weight, bias, eps = [*args, *(None, None, 1e-5)[len(args) - 2 :]][:5]
    return x, shape, weight, bias, eps
