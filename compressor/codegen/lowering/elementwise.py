"""Schedule the functions outside our kernel families: element-wise chains, copies, gathers, small reductions.

Each loop nest is vectorised along its innermost axis where that has a fixed width, and divided over threads
when, at run time, it is large enough to pay for waking them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_map

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import erf, exp, is_nan
from compressor.codegen.machine_code.tir_pipeline import has_blocks

_UNROLLED = 8  # vectors of the innermost axis


@tvm.transform.module_pass(opt_level=0, name="ScheduleElementwise")
class ScheduleElementwise:
    """Schedule every TIR function that still has schedulable blocks."""

    def transform_module(self, mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        """Schedule function after function; our own kernels have no blocks and stay as they are."""
        for gvar, func in list(mod.functions.items()):
            if isinstance(func, tirx.PrimFunc) and has_blocks(func):
                mod[gvar] = _unrolled(_guard(_fusing_products(_schedule(_keeping_nan(func)))))
        return tirx.transform.ConvertSSA()(mod)  # the two branches define the same variables


def _keeping_nan(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the larger and the smaller of two floats be NaN where one of them is, as in PyTorch.

    ``max(a, b)`` is ``a > b ? a : b``, which is b where either is NaN: with a constant for a, that is all.
    """

    def rewrite(op: Any) -> Any:
        if not str(op.ty.dtype).startswith("float") or isinstance(op.a, tirx.FloatImm):
            return op
        if isinstance(op.b, tirx.FloatImm):
            return type(op)(op.b, op.a)
        return tirx.Select(is_nan(op.a), op.a, op) if str(op.ty.dtype) == "float32" else op

    return func.with_body(structural_map(func.body, [(tirx.Max, rewrite), (tirx.Min, rewrite)]))


def _fusing_products(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make a difference of products one instruction each time.

    TVM writes a sum with a product as ``fma``; of a difference, LLVM makes one where product and difference stand
    together, so that bits would depend on whether the product leaves a loop.
    """

    def rewrite(op: Any) -> Any:
        if not str(op.ty.dtype).startswith("float"):
            return op
        minus = tirx.const(-1.0, op.ty.dtype)
        if isinstance(op.b, tirx.Mul):
            return tirx.call_intrin(op.ty.dtype, "tirx.fma", minus * op.b.a, op.b.b, op.a)
        if isinstance(op.a, tirx.Mul):
            return tirx.call_intrin(op.ty.dtype, "tirx.fma", op.a.a, op.a.b, minus * op.b)
        return op

    return func.with_body(structural_map(func.body, (tirx.Sub, rewrite)))


def inlined(func: tirx.PrimFunc) -> tuple[Any, list[Any]]:
    """Return a schedule of a function without the blocks that others can compute where they read them, and the rest."""
    sch = s_tir.Schedule(func)
    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        # What cannot be inlined (outputs, reductions, what feeds a reduction twice) keeps its loops.
        with contextlib.suppress(s_tir.ScheduleError):
            sch.compute_inline(block)
    return sch, sch.get_child_blocks(root)


def _schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sch, blocks = inlined(func)
    for block in blocks:
        loops = sch.get_loops(block)
        kinds = [v.iter_type for v in sch.get(block).iter_vars]
        spatial = 0
        while spatial < len(loops) and len(kinds) == len(loops) and kinds[spatial] == tirx.IterVar.DataPar:
            spatial += 1
        if spatial == 0:
            continue
        outer = loops[:spatial]
        extent = sch.get(outer[-1]).extent
        if isinstance(extent, tirx.IntImm) and (spatial == len(loops) or _reads_along(sch.get(block), spatial - 1)):
            width = next((n for n in (16, 8, 4) if int(extent) % n == 0), 1)
            if width > 1:
                head, lane = sch.split(outer[-1], [None, width])
                sch.reorder(*loops[spatial:], lane)
                sch.vectorize(lane)
                outer[-1] = head
                if len(outer) > 1 and spatial == len(loops):
                    # Out of what is fused: the indices that a fused loop is divided into cost more than a vector.
                    outer.pop()
                    if int(extent) // width <= _UNROLLED:
                        sch.unroll(head)  # the branches of a concatenation are decided for each vector
        sch.parallel(sch.fuse(*outer) if len(outer) > 1 else outer[0])
    return sch.mod["main"]


def _reads_along(block: Any, axis: int) -> bool:
    """Whether neighbours along one axis of a reduction read neighbours in memory."""
    along = block.iter_vars[axis].var
    return all(len(read.region) > 0 and read.region[-1].min.same_as(along) for read in block.reads)


def _unrolled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return tirx.transform.UnrollLoop()(tvm.IRModule({"main": func}))["main"]


def _guard(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let every parallel loop choose at run time: serial when the work is small."""

    def choose(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        serial = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        return tirx.IfThenElse(_work(loop) >= PARALLEL_FROM, loop, serial)

    return func.with_body(structural_map(func.body, (tirx.For, choose)))


def _work(loop: Any) -> Any:
    """Return the product of the extents of a loop nest."""
    product, node = tirx.IntImm("int64", 1), loop
    while isinstance(node, tirx.For):
        product = product * tirx.Cast("int64", node.extent)
        node = node.body
    return product


def _lowered(function: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    """Compute a float32 intrinsic by arithmetic instead of a call to libm for each element."""

    def lower(op: Any) -> Any:
        dtype = str(op.ty.dtype)
        if not dtype.startswith("float32"):
            return None
        return function(op.args[0], int(dtype.partition("x")[2] or 1))

    return lower


tirx.op.register_intrin_lowering("tirx.exp", target="llvm", f=_lowered(exp), level=99)
tirx.op.register_intrin_lowering("tirx.erf", target="llvm", f=_lowered(erf), level=99)
