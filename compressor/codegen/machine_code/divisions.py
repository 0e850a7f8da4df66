"""Divide sizes and places as the machine does: they are not negative, which TVM does not know of sizes that vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import structural_map, structural_walk

_GROWING = (tirx.Add, tirx.Mul, tirx.Min, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
"""Operations that of two numbers of 0 or more make another."""


@tvm.transform.module_pass(opt_level=0, name="DivideSizes")
class DivideSizes:
    """Round quotients towards 0 in functions of a device, where nothing divided is negative.

    Integers that such a function is given are sizes: its tensors' shapes and what the host computes of them.  Rounded
    down, each division of one that varies would be followed by a dozen instructions for negative numbers.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        """Rewrite function after function."""
        for gvar, func in list(mod.functions.items()):
            if isinstance(func, tirx.PrimFunc):
                mod[gvar] = func.with_body(_divided(func))
        return mod


def _divided(func: tirx.PrimFunc) -> Any:
    known: set[Any] = {param for param in func.params if _is_integer(param)}

    def is_size(value: Any) -> bool:
        if isinstance(value, tirx.IntImm):
            return int(value) >= 0
        if isinstance(value, tirx.Var):
            return value in known
        if isinstance(value, tirx.Cast):
            return _is_integer(value.value) and is_size(value.value)
        if isinstance(value, tirx.Max):
            return is_size(value.a) or is_size(value.b)
        return isinstance(value, _GROWING) and is_size(value.a) and is_size(value.b)

    def learn_loop(loop: Any) -> None:
        if is_size(loop.min):
            known.add(loop.loop_var)

    def learn_thread(attr: Any) -> None:
        if attr.attr_key == "thread_extent":
            known.add(attr.node.var)

    def learn_value(bind: Any) -> None:
        if _is_integer(bind.var) and is_size(bind.value):
            known.add(bind.var)

    def rewritten(made: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        def rewrite(op: Any) -> Any:
            if isinstance(op.b, tirx.IntImm) and int(op.b).bit_count() == 1:
                return op  # a shift or a mask, which round down
            return made(op.a, op.b) if is_size(op.a) and is_size(op.b) else op

        return rewrite

    for step in ((tirx.AttrStmt, learn_thread), (tirx.For, learn_loop), (tirx.Bind, learn_value)):
        structural_walk(func.body, step)  # one after another: statements within others come first
    return structural_map(
        func.body, [(tirx.FloorDiv, rewritten(tirx.truncdiv)), (tirx.FloorMod, rewritten(tirx.truncmod))]
    )


def _is_integer(value: Any) -> bool:
    return str(getattr(value.ty, "dtype", "")).startswith(("int", "uint"))
