"""Label every tensor of a running computation with its dependence on the batch entries.

:class:`Flow` is a dispatch mode: it sees each operator that PyTorch runs, runs it on fake tensors (shapes without data)
and derives the results' labels from the operands'.
An operator without a rule is run by its own definition, whose operators are followed in turn. So packed linears and
users' custom operators are judged by what they compute and not by their names.
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
from compressor.verify.independence.induction import follow_one_token, loops_over_tokens
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
_ITEM_HINT = 3  # example value of a number that is read from a tensor


class Sizes(ShapeEnv):
    """Symbolic sizes that report each decision that is taken on them."""

    def __init__(self) -> None:
        super().__init__()
        self.decide: Callable[[Any], None] = lambda question: None

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Report the question, then evaluate it as ShapeEnv does."""
        self.decide(orig_expr)
        return super().evaluate_expr(orig_expr, *args, **kwargs)


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that follows labels through the operators of one graph.

    Attributes:
        node: the graph's node that is running; problems are attributed to it.
        reasons: node name -> the first reason why entries meet there.
        escaped: nodes whose influence cannot be followed through tensors (a number read from one, a write in place):
            every output may depend on them.
    """

    def __init__(self, batch: sympy.Expr, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.sizes = batch, sizes
        self.node: fx.Node | None = None
        self.reasons: dict[str, str] = {}
        self.escaped: set[str] = set()
        self._labels: Any = WeakTensorKeyDictionary()
        self._known: dict[Any, list[Label]] = {}  # results of definitions followed before
        self._items = itertools.count()
        sizes.decide = self.decide
        self._code = self._outside = True  # now running: code, not an operator; the graph, not a definition

    def label(self, tensor: Tensor) -> Label:
        """Return a tensor's label; a real tensor without one is a shared constant, a fake one is mixed."""
        found: Label | None = self._labels.get(tensor)
        if found is None and isinstance(tensor, FakeTensor):
            return self.mixed("a tensor of unknown origin comes in")
        return SHARED if found is None else found

    def mark(self, value: Any, label: Label) -> Any:
        """Give all tensors of a result one label, and return the result."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._labels[leaf] = label
        return value

    def mixed(self, reason: str) -> Mixed:
        """Record that entries meet at the running node, and return the label of a value that comes from it."""
        assert self.node is not None
        self.reasons.setdefault(self.node.name, reason)
        return Mixed(frozenset({self.node.name}))

    def escape(self, reason: str) -> None:
        """Mark every output as possibly dependent on the running node."""
        self.escaped |= self.mixed(reason).nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state, self._code = self._code, False
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._code = state

    def decide(self, question: Any) -> None:
        """Mark all outputs as dependent on the running node if code branches on a symbolic size.

        :class:`Sizes` calls it whenever something asks whether a condition on sizes holds, or for a size's value.
        Operators ask such questions too (a slice, whether its end lies inside), and compute the same whatever the
        answer. Code that asks has another branch, which is not followed.
        """
        if self._code and question not in (True, False) and _asked_by_code():
            self.escape(f"code branches on a size ({question}), and only one branch was followed")

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket in _SHAPES:  # sizes that depend on data are found at the operator that creates them
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
        """Return whether memory is allocated inside an operator, which writes it before it reads it, and not by the
        graph.
        """
        target = self.node.target if self.node is not None else None
        return not self._outside or (isinstance(target, OpOverload) and target.overloadpacket not in _UNWRITTEN)

    def _inside(self, func: OpOverload) -> str:
        return "" if self.node is not None and self.node.target is func else f"{func}: "

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator on fake tensors; an integer that is read from a tensor becomes a symbol, like a size."""
        reads = func in (_aten.item.default, _aten._local_scalar_dense.default)
        if reads and not args[0].dtype.is_floating_point and args[0].dtype != torch.bool:
            return self._symbol(_ITEM_HINT)
        return func(*args, **kwargs)

    def _symbol(self, hint: int) -> Any:
        name = ConstantSource(f"item_{next(self._items)}")
        symbol = self.sizes.create_symbol(hint, name, DimDynamic.DYNAMIC, positive=None)
        return self.sizes.create_symintnode(symbol, hint=hint, source=name)

    def _follow(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on operands that hold entries, label its results and return them.

        Raises:
            CannotProve: entries meet in it, or nothing shows that they do not.
        """
        if func._schema.is_mutable:
            raise CannotProve("it writes into a tensor in place, and who else sees that memory is not known")
        # A custom operator's tags are an unchecked claim of its author; PyTorch's own are trusted.
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
                sizes = sizes_of(result)
                places = product([label.outer, self.batch, label.inner])
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
        if loops_over_tokens(func):
            out, labels = self._induct(func, args, kwargs, definition)
            if before == (len(self.reasons), len(self.escaped)):
                self._known[key] = labels
            return out
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

    def _induct(
        self, func: OpOverload, args: Any, kwargs: Any, definition: Callable[..., Any]
    ) -> tuple[Any, list[Label]]:
        """Follow one token through a loop over tokens, label the results of all, and return both."""
        state = self._code, self._outside

        def follow(**given: Any) -> Any:
            self._code, self._outside = True, False
            try:
                with self:
                    return definition(**given)
            finally:
                self._code, self._outside = state

        labels = follow_one_token(func, _bind(func, args, kwargs), self.label, self.mark, follow)
        out = func(*args, **kwargs)
        self._mark_each(list(out), labels)
        return out, labels

    def _key(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        def describe(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return ("tensor", self.label(leaf), sizes_of(leaf), leaf.dtype)
            return size_of(leaf) if isinstance(leaf, torch.SymInt) else (type(leaf), leaf)

        return func, str(tree_map(describe, (args, kwargs)))

    def _has_effects(self, func: OpOverload, args: Any, out: Any) -> bool:
        """Return whether an operator acts other than through the tensors that it returns."""
        if func._schema.is_mutable or (
            torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket not in RULES
        ):
            return True
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            return True
        return bool(_unbacked(out) - _unbacked(args))


def _asked_by_code() -> bool:
    """Return whether the innermost frame outside PyTorch turned a symbol into a bool or a number, as ``if`` and
    ``range`` do.
    """
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
    """Return the symbols of sizes that depend on data."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return set[sympy.Symbol]().union(*(free_unbacked_symbols(tensor) for tensor in tensors))


def _definition(func: OpOverload) -> Callable[..., Any] | None:
    """Return code that computes an operator from others: a custom operator's own, PyTorch's decomposition, or None."""
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
    """Stand in for ``int`` in followed definitions: a number read from a tensor stays a symbol instead of taking one
    value.
    """
    number = value.item() if isinstance(value, Tensor) else value
    return number if isinstance(number, torch.SymInt) else int(number)


def _bind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, defaults filled in."""
    arguments = func._schema.arguments
    bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**bound, **{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
