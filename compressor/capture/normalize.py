"""Rewrites of a freshly exported graph into the few operators that passes and kernels know.

Pattern, check, rewrite: each rule looks at operators and at the fake values (``node.meta["val"]``) that the
export recorded, and leaves alone what it does not recognise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

import compressor.ops  # noqa: F401  (registers the operators)

_aten = torch.ops.aten
_ours = torch.ops.compressor

_CHECKS = frozenset(
    {
        _aten._assert_tensor_metadata.default,
        _aten._assert_scalar.default,
        _aten._assert_async.msg,
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
    }
)
# Operators that return their input when type, shape and layout already are as asked.
_MAYBE_NOTHING = frozenset(
    {
        _aten.to.dtype,
        _aten.to.device,
        _aten.to.dtype_layout,
        _aten.to.other,
        _aten.type_as.default,
        _aten._to_copy.default,
        _aten.detach.default,
        _aten.alias.default,
        _aten.lift_fresh_copy.default,
        _aten.contiguous.default,
        _aten.view.default,
        _aten.reshape.default,
        _aten.expand.default,
    }
)
_VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})


@dataclass
class StoredLayout:
    """How parameters are held after normalisation, where that differs from the checkpoint."""

    transposed: set[str] = field(default_factory=set)  # checkpoint [in, out], parameter a view [out, in]
    plus_one: set[str] = field(default_factory=set)  # Gemma's norms scale by 1 + w: the parameter is 1 + w


def normalize(graph: fx.Graph) -> StoredLayout:
    """Rewrite in place: linears, RMS norms, means over images; drop checks, casts and copies that do nothing.

    Args:
        graph: call_function nodes over ``get_attr`` parameters, each with a fake ``meta["val"]``.
    """
    layout = StoredLayout()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS:
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()  # so that the rules count real users only
    transposable = _used_only_transposed(graph)
    for node in list(graph.nodes):
        if node.target is _aten.linear.default:
            _rewrite_linear(graph, node)
        elif node.target is _aten.addmm.default:
            _rewrite_addmm(graph, node, transposable, layout)
        elif node.target is _aten.mul.Tensor:
            _rewrite_rms_norm(graph, node, layout)
        elif node.target is _aten.rms_norm.default:
            _rewrite_fused_rms_norm(graph, node)
        elif node.target is _aten.adaptive_avg_pool2d.default and list(node.args[1]) == [1, 1]:
            # What it is; where channels come last PyTorch also relabels the result's memory, which cannot be followed.
            _replace(graph, node, _aten.mean.dim, (node.args[0], [-1, -2], True))
    graph.eliminate_dead_code()
    graph.lint()
    return layout


def cast_half_embeddings(graph: fx.Graph, dtypes: dict[str, torch.dtype]) -> None:
    """Follow each embedding whose table is stored in half precision by a cast: arithmetic is float32."""
    for node in list(graph.nodes):
        if node.target is not _aten.embedding.default or node.args[0].op != "get_attr":
            continue
        dtype = dtypes[node.args[0].target]
        if dtype == torch.float32:
            continue
        with graph.inserting_after(node):
            cast = graph.call_function(_aten.to.dtype, (node, torch.float32))
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        cast.meta = dict(node.meta)
        value = node.meta["val"]
        node.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=dtype)}


def keeps_storage(node: fx.Node) -> bool:
    """Whether every use of this parameter reads it in the type it is stored in (linear or embedding weight)."""
    return all(
        (user.target is _ours.dense_linear.default and user.args[1] is node and user.args[0] is not node)
        or (user.target is _aten.embedding.default and user.args[0] is node)
        for user in node.users
    )


def _does_nothing(node: fx.Node) -> bool:
    target, args = node.target, node.args
    if target is _aten.dropout.default:
        return bool(args[1] == 0.0) or args[2] is False
    if target is _aten.slice.Tensor:
        return args[2:3] in ((), (None,), (0,)) and (len(args) < 4 or args[3] in (None, 2**63 - 1)) and len(args) < 5
    before = args[0].meta.get("val") if args and isinstance(args[0], fx.Node) else None
    after = node.meta.get("val")
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    same: bool = before.dtype == after.dtype and _shape(before) == _shape(after)
    if target is _aten.mul.Tensor:  # rotary embeddings without an attention factor multiply by 1.0
        return same and isinstance(args[1], int | float) and bool(args[1] == 1)
    if target is _aten.contiguous.default:
        return same and bool(before.is_contiguous())
    return same and target in _MAYBE_NOTHING


def _shape(value: Tensor) -> list[str]:
    return [str(size) for size in value.shape]  # symbols print alike when they are the same


def _replace(graph: fx.Graph, node: fx.Node, target: object, args: tuple[object, ...]) -> fx.Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _is_parameter(node: Any, dims: int) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.meta["val"].dim() == dims


def _is_float(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.meta["val"].dtype == torch.float32


def _rewrite_linear(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias = (*node.args, None)[:3]
    if _is_float(x) and _is_parameter(weight, 2):
        _replace(graph, node, _ours.dense_linear.default, (x, weight, bias))


def _used_only_transposed(graph: fx.Graph) -> set[fx.Node]:
    return {
        node
        for node in graph.nodes
        if _is_parameter(node, 2)
        and all(user.target is _aten.addmm.default and user.args[2] is node for user in node.users)
    }


def _rewrite_addmm(graph: fx.Graph, node: fx.Node, transposable: set[fx.Node], layout: StoredLayout) -> None:
    bias, x, weight = node.args
    if weight not in transposable or node.kwargs or not _is_float(x) or not _is_parameter(bias, 1):
        return
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(weight.target, str)
    if weight.target not in layout.transposed:
        layout.transposed.add(weight.target)
        weight.meta = {**weight.meta, "val": weight.meta["val"].t()}
    out_features = weight.meta["val"].shape[0]
    # Conv1D flattens to two dimensions and back; the operator takes any number of them.
    whole = x.args[0] if x.target in _VIEWS else None
    if isinstance(whole, fx.Node) and _shape(whole.meta["val"])[-1:] == _shape(x.meta["val"])[-1:]:
        unflattened = [*_shape(whole.meta["val"])[:-1], str(out_features)]
        users = list(node.users)
        if all(user.target in _VIEWS and _shape(user.meta["val"]) == unflattened for user in users):
            with graph.inserting_before(node):
                new = graph.call_function(_ours.dense_linear.default, (whole, weight, bias))
            new.meta = {**node.meta, "val": users[0].meta["val"]}
            for user in users:
                user.replace_all_uses_with(new)
                graph.erase_node(user)
            graph.erase_node(node)
            return
    _replace(graph, node, _ours.dense_linear.default, (x, weight, bias))


def _rewrite_rms_norm(graph: fx.Graph, node: fx.Node, layout: StoredLayout) -> None:
    """``w * (x * rsqrt(mean(x ** 2, -1) + eps))``, and the form with ``1 + w``."""
    for scaled, gain in (node.args[:2], node.args[1::-1]):
        found = _normalized(scaled)
        weight = _gain(gain)
        if found is None or weight is None:
            continue
        x, eps = found
        if _shape(weight.meta["val"]) != _shape(x.meta["val"])[-1:] or not _is_float(x):
            continue
        if weight is not gain:
            assert isinstance(weight.target, str)
            layout.plus_one.add(weight.target)
        _replace(graph, node, _ours.rms_norm.default, (x, weight, eps))
        return


def _normalized(node: Any) -> tuple[fx.Node, float] | None:
    """x and eps when the node is ``x * rsqrt(mean(x ** 2, -1, keepdim) + eps)``."""
    if not _calls(node, _aten.mul.Tensor):
        return None
    for x, root in (node.args[:2], node.args[1::-1]):
        if not (isinstance(x, fx.Node) and _is_inverse_root(root) and _calls(root.args[0], _aten.add.Tensor)):
            continue
        mean, eps = root.args[0].args[:2]
        if not (isinstance(eps, float) and _calls(mean, _aten.mean.dim)):
            continue
        if mean.args[1:] == ([-1], True) and _is_square(mean.args[0], x):
            return x, eps
    return None


def _is_inverse_root(node: Any) -> TypeGuard[fx.Node]:
    return _calls(node, _aten.rsqrt.default) or (_calls(node, _aten.pow.Tensor_Scalar) and node.args[1:] == (-0.5,))


def _is_square(node: Any, x: fx.Node) -> bool:
    return (
        (_calls(node, _aten.pow.Tensor_Scalar) and node.args == (x, 2))
        or (_calls(node, _aten.mul.Tensor) and node.args == (x, x))
        or (_calls(node, _aten.square.default) and node.args == (x,))
    )


def _gain(node: Any) -> fx.Node | None:
    """The parameter behind ``w``, or behind ``1 + w`` when that sum is its only use."""
    if _is_parameter(node, 1):
        return node
    if _calls(node, _aten.add.Tensor) and len(node.args) == 2 and node.args[1] == 1 and not node.kwargs:
        weight = node.args[0]
        if _is_parameter(weight, 1) and len(weight.users) == 1 and len(node.users) == 1:
            return weight
    return None


def _rewrite_fused_rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = (*node.args, None, None)
    x, shape, weight, eps = args[:4]
    if _is_float(x) and len(shape) == 1 and _is_parameter(weight, 1) and isinstance(eps, float):
        _replace(graph, node, _ours.rms_norm.default, (x, weight, eps))


def _calls(node: Any, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target
