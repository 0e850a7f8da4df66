"""Labels every tensor of a running computation with what it depends on.

:class:`Flow` is a dispatch mode: it sees each operator as PyTorch takes a computation apart, runs it on fake tensors
(shapes without data) and derives the results' labels from the operands'.  An operator without a rule is run by its own
definition, which is seen operator by operator in turn: so our packed linears, and anybody's custom operators, are
judged by what they compute and not by their names.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import PurePath
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._dynamo.source import ConstantSource
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from compressor.errors import first_line
from compressor.verify.independence.call import Call, pointwise
from compressor.verify.independence.labels import (
    SHARED,
    CannotProve,
    Entries,
    Label,
    Mixed,
    product,
    same_size,
    size_of,
    sizes_of,
)
from compressor.verify.independence.rules import RULES

_aten = torch.ops.aten
_UNWRITTEN = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
    | {_aten.empty_quantized, _aten._empty_affine_quantized, _aten._empty_per_channel_affine_quantized}
)
_SHAPES = frozenset(
    {_aten.sym_size, _aten.sym_stride, _aten.sym_numel, _aten.sym_storage_offset, torch.ops.prim.device}
)
_ITEM_HINT = 3  # a value that an index read from a tensor may well have


class Sizes(ShapeEnv):
    """Symbolic sizes that tell when a decision is taken on them."""

    def __init__(self) -> None:
        super().__init__()
        self.decide: Callable[[Any], None] = lambda question: None

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """As in ShapeEnv."""
        self.decide(orig_expr)
        return super().evaluate_expr(orig_expr, *args, **kwargs)


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through the operators of one graph.

    Attributes:
        node: the graph's node that is running; what goes wrong is charged to it.
        reasons: node name -> the first reason why entries meet there.
        escaped: nodes whose influence cannot be followed through tensors (a number read from one, a write in place):
            every output may depend on it.
    """

    def __init__(self, batch: sympy.Expr, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.sizes = batch, sizes
        self.node: fx.Node | None = None
        self.reasons: dict[str, str] = {}
        self.escaped: set[str] = set()
        self._labels: Any = WeakTensorKeyDictionary()
        self._known: dict[Any, list[Label]] = {}  # results of definitions that were followed before
        self._items = itertools.count()
        sizes.decide = self.decide
        self._code = self._outside = True  # what runs: code rather than an operator; the graph rather than a definition

    def label(self, tensor: Tensor) -> Label:
        """What a tensor depends on; one that is not of this run is a constant."""
        found: Label | None = self._labels.get(tensor)
        if found is None and isinstance(tensor, FakeTensor):
            return self.mixed("a tensor of unknown origin comes in")
        return SHARED if found is None else found

    def mark(self, value: Any, label: Label) -> Any:
        """Give all tensors of a result one label; the result."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._labels[leaf] = label
        return value

    def mixed(self, reason: str) -> Mixed:
        """The label of what comes from a place where entries meet: the node that is running."""
        assert self.node is not None
        self.reasons.setdefault(self.node.name, reason)
        return Mixed(frozenset({self.node.name}))

    def escape(self, reason: str) -> None:
        """Charge the node that is running with all outputs."""
        self.escaped |= self.mixed(reason).nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state, self._code = self._code, False
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._code = state

    def decide(self, question: Any) -> None:
        """Called as something asks whether a condition on symbolic sizes holds, or for its one value.

        Operators ask such questions too (a slice, whether its end lies inside), and compute the same whatever the
        answer.  Code that asks has another branch, which is not followed.
        """
        if self._code and question not in (True, False) and _asked_by_code():
            self.escape(f"code branches on a size ({question}), and only one branch was followed")

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket in _SHAPES:  # sizes that depend on data are found where they come into being
            return func(*args, **kwargs)
        if func.overloadpacket in _UNWRITTEN and not self._inside_operator():
            label = self.mixed("it gives memory that nothing has written, where another entry's data may remain")
            return self.mark(func(*args, **kwargs), label)
        labels = [self.label(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        mixed = frozenset[str]().union(*(label.nodes for label in labels if isinstance(label, Mixed)))
        if mixed:
            out = self._run(func, args, kwargs)
            if self._has_effects(func, args, out):
                self.escaped |= mixed
            return self.mark(out, Mixed(mixed))
        if all(label == SHARED for label in labels):
            return self.mark(self._run(func, args, kwargs), SHARED)
        try:
            return self._follow(func, args, kwargs)
        except CannotProve as problem:
            reason = f"{self._inside(func)}{problem}"
            label = self.mixed(reason)
        out = self._run(func, args, kwargs)
        if self._has_effects(func, args, out):
            self.escape(reason)
        return self.mark(out, label)

    def _inside_operator(self) -> bool:
        """Whether what runs is part of an operator, which writes memory before it reads it, rather than the graph's."""
        target = self.node.target if self.node is not None else None
        return not self._outside or (isinstance(target, OpOverload) and target.overloadpacket not in _UNWRITTEN)

    def _inside(self, func: OpOverload) -> str:
        return "" if self.node is not None and self.node.target is func else f"{func}: "

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on fake tensors; a whole number read from a tensor becomes a symbol like a size."""
        reads = func in (_aten.item.default, _aten._local_scalar_dense.default)
        if reads and not args[0].dtype.is_floating_point and args[0].dtype != torch.bool:
            return self._symbol(_ITEM_HINT)
        return func(*args, **kwargs)

    def _symbol(self, hint: int) -> Any:
        name = ConstantSource(f"item_{next(self._items)}")
        symbol = self.sizes.create_symbol(hint, name, DimDynamic.DYNAMIC, positive=None)
        return self.sizes.create_symintnode(symbol, hint=hint, source=name)

    def _follow(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on operands that hold entries, and label its results.

        Raises:
            CannotProve: entries meet in it, or nothing shows that they do not.
        """
        if func._schema.is_mutable:
            raise CannotProve("it writes into a tensor in place, and who else sees that memory is not known")
        # A custom operator's tags are its author's word; PyTorch's own are taken as they are.
        tagged = torch.Tag.pointwise in func.tags and not _is_custom(func)
        rule = pointwise if tagged else RULES.get(func.overloadpacket)
        if rule is None:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise CannotProve("how many random numbers it draws may depend on the entries' data")
            return self._define(func, args, kwargs)
        out = func(*args, **kwargs)
        if self._has_effects(func, args, out):
            raise CannotProve("it makes a number or a size out of the entries' data")
        given = rule(Call(_bind(func, args, kwargs), out, self.label, self.batch))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._mark_each(results, given if isinstance(given, list) else [given] * len(results))
        return out

    def _mark_each(self, results: Sequence[Tensor], labels: Sequence[Label]) -> None:
        for result, label in zip(results, labels, strict=True):
            if isinstance(label, Entries):
                sizes, places = sizes_of(result), product([label.outer, self.batch, label.inner])
                if label.dim >= len(sizes) or not same_size(sizes[label.dim], places):
                    raise CannotProve(
                        f"dimension {label.dim} of {list(result.shape)} is not the entries' {places} places"
                    )
            self._labels[result] = label

    def _define(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        definition = _definition(func)
        if definition is None:
            raise CannotProve("nothing is known of how this operator treats entries")
        key = self._key(func, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            out = func(*args, **kwargs)
            self._mark_each([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], known)
            return out
        before = len(self.reasons), len(self.escaped)
        state = self._code, self._outside
        self._code, self._outside = _is_custom(func), False
        try:
            with self:
                out = definition(*args, **kwargs)
        except Exception as error:
            line = first_line(error, "")
            raise CannotProve(f"its definition cannot be followed ({type(error).__name__}: {line})") from error
        finally:
            self._code, self._outside = state
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if before == (len(self.reasons), len(self.escaped)):
            self._known[key] = [self.label(result) for result in results]
        return out

    def _key(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        def describe(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return ("tensor", self.label(leaf), sizes_of(leaf), leaf.dtype)
            return size_of(leaf) if isinstance(leaf, torch.SymInt) else (type(leaf), leaf)

        return func, str(tree_map(describe, (args, kwargs)))

    def _has_effects(self, func: OpOverload, args: Any, out: Any) -> bool:
        """Whether an operator acts otherwise than through the tensors that it returns."""
        if func._schema.is_mutable or (
            torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket not in RULES
        ):
            return True
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            return True
        return bool(_unbacked(out) - _unbacked(args))


def _asked_by_code() -> bool:
    """Whether the innermost frame outside PyTorch turned a symbol into a bool or an int, as ``if`` and ``range`` do."""
    frame, inner = sys._getframe(1), ""
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or _is_torch(frame.f_code.co_filename)):
        inner, frame = frame.f_code.co_name, frame.f_back
    return inner in ("__bool__", "__int__", "__index__", "__float__")


@lru_cache(maxsize=1024)
def _is_torch(file: str) -> bool:
    return PurePath(torch.__file__).parent in PurePath(file).parents


def _is_custom(func: OpOverload) -> bool:
    return _maybe_get_opdef(func) is not None


def _unbacked(value: Any) -> set[sympy.Symbol]:
    """Symbols of sizes that depend on data."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return set[sympy.Symbol]().union(*(free_unbacked_symbols(tensor) for tensor in tensors))


def _definition(func: OpOverload) -> Callable[..., Any] | None:
    """Code that computes an operator from others: a custom operator's own, or PyTorch's decomposition."""
    own = _maybe_get_opdef(func)
    if own is not None:
        code = own._init_fn
        names = {**code.__globals__, "int": _whole}
        return FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    found: Callable[..., Any] | None = decomposition_table.get(func)
    if found is None and func._can_decompose():
        return func.decompose
    return found


def _whole(value: Any) -> Any:
    """``int`` for followed definitions: a number read from a tensor stays a symbol instead of taking one value."""
    number = value.item() if isinstance(value, Tensor) else value
    return number if isinstance(number, torch.SymInt) else int(number)


def _bind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    arguments = func._schema.arguments
    bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**bound, **{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
