"""Rules that turn RMS norms, written out or PyTorch's own, into ours.

    w * (x * rsqrt(mean(x ** 2, -1) + eps))          becomes   rms_norm(x, w, eps)
    (1 + w) * (x * rsqrt(mean(x ** 2, -1) + eps))    becomes   rms_norm(x, w, eps), the parameter w raised by 1

Factors come in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

from compressor.graph.matching import calls, is_float, is_parameter, replace_by, shape_of
from compressor.graph.rules import why_not

_aten = torch.ops.aten
_ours = torch.ops.compressor


class _Norm(NamedTuple):
    """A written-out RMS norm: ``gain * (x * rsqrt(mean + eps))`` with ``mean`` of the squares of x."""

    product: fx.Node
    x: fx.Node
    mean: fx.Node
    eps: Any
    gain: Any


@dataclass
class RmsNorm:
    """A written-out RMS norm becomes ours, with the gain ``w`` or, as in Gemma, ``1 + w``."""

    plus_one: set[str]
    name = "RMS norm"

    def pattern(self, node: fx.Node) -> _Norm | None:
        """Match ``gain * (x * rsqrt(mean(x ** 2) + eps))``, factors in any order."""
        if not calls(node, _aten.mul.Tensor):
            return None
        for scaled, gain in (node.args[:2], node.args[1::-1]):
            if calls(scaled, _aten.mul.Tensor):
                for x, root in (scaled.args[:2], scaled.args[1::-1]):
                    found = _mean_square(x, root)
                    if found is not None:
                        return _Norm(node, x, *found, gain)  # type: ignore[arg-type]
        return None

    def check(self, match: _Norm) -> str:
        """Ask for a mean over float32 channels, a constant epsilon, and a gain that is stored."""
        weight = _gain(match.gain)
        return why_not(
            (match.mean.args[1:] != ([-1], True), "its mean is not over the last dimension alone"),
            (not isinstance(match.eps, float), "its epsilon is computed"),
            (weight is None, "its gain is not a stored vector, or 1 + a vector that nothing else reads"),
            (
                weight is not None and shape_of(weight.meta["val"]) != shape_of(match.x.meta["val"])[-1:],
                "its gain is not one number a channel",
            ),
            (not is_float(match.x), "its input is not float32"),
        )

    def rewrite(self, graph: fx.Graph, match: _Norm) -> fx.Node:
        """Call ``rms_norm``."""
        weight = _gain(match.gain)
        assert weight is not None and isinstance(weight.target, str)
        if weight is not match.gain:
            self.plus_one.add(weight.target)
        return replace_by(graph, match.product, _ours.rms_norm.default, (match.x, weight, match.eps))


def _mean_square(x: Any, root: Any) -> tuple[fx.Node, Any] | None:
    """Return mean and epsilon where ``root`` is ``rsqrt(mean(x ** 2) + eps)``."""
    if not (isinstance(x, fx.Node) and _is_inverse_root(root) and calls(root.args[0], _aten.add.Tensor)):
        return None
    mean, eps = root.args[0].args[:2]
    return (mean, eps) if calls(mean, _aten.mean.dim) and _is_square(mean.args[0], x) else None


def _is_inverse_root(node: Any) -> TypeGuard[fx.Node]:
    return calls(node, _aten.rsqrt.default) or (calls(node, _aten.pow.Tensor_Scalar) and node.args[1:] == (-0.5,))


def _is_square(node: Any, x: fx.Node) -> bool:
    return (
        (calls(node, _aten.pow.Tensor_Scalar) and node.args == (x, 2))
        or (calls(node, _aten.mul.Tensor) and node.args == (x, x))
        or (calls(node, _aten.square.default) and node.args == (x,))
    )


def _gain(node: Any) -> fx.Node | None:
    """Return the parameter behind ``w``, or behind ``1 + w`` when that sum is its only use."""
    if is_parameter(node, 1):
        return node
    if calls(node, _aten.add.Tensor) and len(node.args) == 2 and node.args[1] == 1 and not node.kwargs:
        weight = node.args[0]
        if is_parameter(weight, 1) and len(weight.users) == 1 and len(node.users) == 1:
            return weight
    return None


class FusedRmsNorm:
    """PyTorch's RMS norm becomes ours."""

    name = "fused RMS norm"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match PyTorch's RMS norm."""
        return node if node.target is _aten.rms_norm.default else None

    def check(self, match: fx.Node) -> str:
        """Ask for float32 channels, a stored weight and a stated epsilon."""
        x, shape, weight, eps = self._arguments(match)
        return why_not(
            (not is_float(x), "its input is not float32"),
            (len(shape) != 1, f"it is over {len(shape)} dimensions, not over the channels alone"),
            (not is_parameter(weight, 1), "it has no stored weight"),
            (not isinstance(eps, float), "its epsilon is not stated"),
        )

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call ``rms_norm``."""
        x, _, weight, eps = self._arguments(match)
        return replace_by(graph, match, _ours.rms_norm.default, (x, weight, eps))

    @staticmethod
    def _arguments(node: fx.Node) -> tuple[Any, ...]:
        return (*node.args, None, None)[:4]
