"""Rules that drop operators without effect.

    x -> to(float32) -> y       becomes      x -> y       where x is float32 already
    assert(x.shape[0] > 0)      is removed

The fake values (``node.meta["val"]``) that the export recorded tell what an operator changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from compressor.graph.matching import shape_of
from compressor.graph.rules import why_not

_aten = torch.ops.aten

_CHECKS = frozenset(
    {
        _aten._assert_tensor_metadata.default,
        _aten._assert_scalar.default,
        _aten._assert_async.msg,
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
    }
)
# Operators that return their input when type, shape and layout already are as asked, or when they take all of it.
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
        _aten.dropout.default,
        _aten.slice.Tensor,
    }
)

_PLAIN: dict[Any, Any] = {
    _aten.repeat_interleave.self_int: None,
    _aten.repeat.default: _aten.expand.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten.concatenate.default: _aten.cat.default,
    _aten.new_empty.default: _aten.new_zeros.default,
    _aten.to.device: _aten.to.dtype,
}


class PlainForm:
    """An operator that says a plainer one in another way becomes that one.

    repeat_interleave(x, n, d)      becomes      flatten(expand(unsqueeze(x, d + 1)), d, d + 1)
    _unsafe_view(x, shape)          becomes      reshape(x, shape)
    concatenate(tensors)            becomes      cat(tensors)
    new_empty(x, shape)             becomes      new_zeros(x, shape)      (all of it is written over)
    to(x, device, dtype)            becomes      to(x, dtype)
    repeat(x, counts)               becomes      expand(x, counts)        (where x has one place to repeat)
    """

    name = "plain form"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match one of the operators."""
        return node if node.op == "call_function" and node.target in _PLAIN else None

    def check(self, match: fx.Node) -> str:
        """Ask for a dimension, where elements are repeated, and for single ones, where whole dimensions are."""
        if match.target is _aten.repeat.default:
            args: Any = match.args
            sizes, counts = args[0].meta["val"].shape, args[1]
            single = [(type(size) is int and size == 1) or n == 1 for size, n in zip(sizes, counts, strict=False)]
            return why_not((len(counts) != len(sizes) or not all(single), "it repeats several places"))
        dim = match.args[2] if len(match.args) > 2 else match.kwargs.get("dim")
        repeats = match.target is _aten.repeat_interleave.self_int
        return why_not((repeats and not isinstance(dim, int), "it repeats a flattened tensor"))

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> fx.Node:
        """Call the plain operators."""
        args: Any = match.args
        if match.target is _aten.to.device:
            match.args, match.kwargs = (args[0], args[2] if len(args) > 2 else match.kwargs["dtype"]), {}
        if match.target is _aten.repeat.default:
            match.args = (args[0], [-1 if type(n) is int and n == 1 else n for n in args[1]])
        if match.target is not _aten.repeat_interleave.self_int:
            match.target = _PLAIN[match.target]
            return match
        x, repeats = args[:2]
        dim = (args[2] if len(args) > 2 else match.kwargs["dim"]) % x.meta["val"].dim()
        sizes = [-1] * (x.meta["val"].dim() + 1)
        sizes[dim + 1] = repeats
        made: fx.Node = x
        with graph.inserting_before(match):
            for target, more in (
                (_aten.unsqueeze.default, (dim + 1,)),
                (_aten.expand.default, (sizes,)),
                (_aten.flatten.using_ints, (dim, dim + 1)),
            ):
                value = target(made.meta["val"], *more)
                made = graph.call_function(target, (made, *more))
                made.meta = {**match.meta, "val": value}
        match.replace_all_uses_with(made)
        graph.erase_node(match)
        return made


class DropCheck:
    """An assertion about shapes or types has no result, and is dropped."""

    name = "check dropped"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match an assertion."""
        return node if node.op == "call_function" and node.target in _CHECKS else None

    def check(self, match: fx.Node) -> str:
        """Ask for nothing: the export has made sure of what it asserts."""
        return ""

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> None:
        """Remove the node."""
        graph.erase_node(match)


class DropNoOp:
    """A cast, copy, view, slice, dropout or product with 1 that returns its input is dropped."""

    name = "operator without effect dropped"

    def pattern(self, node: fx.Node) -> fx.Node | None:
        """Match an operator that may return its input; a product only with a number."""
        if node.op != "call_function":
            return None
        by_number = node.target is _aten.mul.Tensor and isinstance(node.args[1], int | float)
        return node if by_number or node.target in _MAYBE_NOTHING else None

    def check(self, match: fx.Node) -> str:
        """Ask for the same type, shape, layout and values as those of the input."""
        target, args = match.target, match.args
        if target is _aten.dropout.default:
            return why_not((bool(args[1] != 0.0) and args[2] is not False, "it drops values"))
        if target is _aten.slice.Tensor:
            first, last = args[2:3] in ((), (None,), (0,)), len(args) < 4 or args[3] in (None, 2**63 - 1)
            if len(args) == 3 and isinstance(args[2], fx.Node):  # the last so many: all, if there are as many as before
                first = shape_of(args[0].meta["val"]) == shape_of(match.meta["val"])  # type: ignore[union-attr]
            return why_not((not (first and last and len(args) < 5), "it takes a part of the dimension"))
        before = args[0].meta.get("val") if args and isinstance(args[0], fx.Node) else None
        after = match.meta.get("val")
        if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
            return "its input or its result is not a tensor"
        if before.dtype != after.dtype:
            return f"it turns {before.dtype} into {after.dtype}"
        if shape_of(before) != shape_of(after):
            return f"it turns {shape_of(before)} into {shape_of(after)}"
        if target is _aten.mul.Tensor and args[1] != 1:
            return f"it multiplies by {args[1]}"
        moves = target is _aten.contiguous.default and not before.is_contiguous()
        return "it changes the layout in memory" if moves else ""

    def rewrite(self, graph: fx.Graph, match: fx.Node) -> None:
        """Let the readers read the input."""
        match.replace_all_uses_with(match.args[0])  # type: ignore[arg-type]
        graph.erase_node(match)
