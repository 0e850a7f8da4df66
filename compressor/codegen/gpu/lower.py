"""Give threads to the functions outside our kernel families: element-wise chains, copies, gathers, reductions.

Each block of a function becomes a launch of its own, with the elements of its output divided over threads.  A reduction
over many elements has a block of threads a result; one over a few, a thread.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_map, structural_walk

from compressor.codegen.kernels.vector import is_nan
from compressor.codegen.lowering.elementwise import inlined
from compressor.codegen.machine_code.tir_pipeline import has_blocks
from compressor.errors import VerificationError

THREADS = 256
_FEW = 64  # elements that one thread reduces alone


@tvm.transform.module_pass(opt_level=0, name="ScheduleThreads")
class ScheduleThreads:
    """Schedule every TIR function that still has schedulable blocks, and check that all functions run on the GPU."""

    def transform_module(self, mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        """Schedule function after function; our own kernels have no blocks and stay as they are.

        Raises:
            VerificationError: a function computes outside its threads, which the host cannot: it has no device memory.
        """
        for gvar, func in list(mod.functions.items()):
            if not isinstance(func, tirx.PrimFunc):
                continue
            if has_blocks(func):
                with _named(gvar.name_hint):
                    mod[gvar] = func = _schedule(_keeping_nan(func))
            if not _is_bound(func.body):
                raise VerificationError(
                    f"{gvar.name_hint}: a part of it has no threads, so that it would run on the host; this operator "
                    "needs a kernel of its own on a GPU"
                )
        return mod


@contextlib.contextmanager
def _named(function: str) -> Any:
    """Say which function cannot be scheduled."""
    try:
        yield
    except s_tir.ScheduleError as error:
        raise VerificationError(f"{function}: it cannot be divided over a GPU's threads: {error}") from error


def _keeping_nan(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the larger and the smaller of two floats be NaN where one of them is, as in PyTorch; CUDA's are the other.

    The largest score of a softmax stays as it is: its threads share it as TVM knows how, and the sum has NaN anyway.
    """
    kept: dict[str, Any] = {}

    def keep(block: Any) -> None:
        if _of_softmax(block):
            kept[block.name_hint] = block

    def rewrite(op: Any) -> Any:
        if str(op.ty.dtype) != "float32":
            return op
        for operand in (op.b, op.a):
            if not isinstance(operand, tirx.FloatImm):
                op = tirx.Select(is_nan(operand), operand, op)
        return op

    structural_walk(func.body, (s_tir.SBlock, keep))
    body = structural_map(func.body, [(tirx.Max, rewrite), (tirx.Min, rewrite)])
    return func.with_body(structural_map(body, (s_tir.SBlock, lambda block: kept.get(block.name_hint, block))))


def _of_softmax(block: Any) -> bool:
    return "softmax_maxelem" in str(block.name_hint)


def _schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sch, blocks = inlined(func)
    for block in blocks:
        _bind(sch, block)
    return sch.mod["main"]


def _bind(sch: Any, block: Any) -> None:
    """Divide one block's loops over blocks and threads."""
    loops, kinds = sch.get_loops(block), [v.iter_type for v in sch.get(block).iter_vars]
    spatial, reduced = loops, []
    if len(kinds) == len(loops):
        spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.DataPar]
        reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != tirx.IterVar.DataPar]
        sch.reorder(*spatial, *reduced)
    if not spatial:
        spatial = [sch.add_unit_loop(reduced[0] if reduced else block)]
    rows = sch.fuse(*spatial)
    if reduced and _is_long(sch, reduced) and _is_shared(sch.get(block)):
        _, lane = sch.split(sch.fuse(*reduced), [None, THREADS])
        sch.bind(rows, "blockIdx.x")
        sch.bind(lane, "threadIdx.x")
        return
    blocks, thread = sch.split(rows, [None, THREADS])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")


def _is_shared(block: Any) -> bool:
    """Tell whether threads can share a reduction: a sum, or one that :func:`_keeping_nan` leaves alone."""
    update = block.body
    is_sum = isinstance(update, tirx.BufferStore) and isinstance(update.value, tirx.Add)
    return is_sum or _of_softmax(block)


def _is_long(sch: Any, reduced: list[Any]) -> bool:
    """Tell whether a result is that of many elements, or of an unknown number."""
    extents = [sch.get(loop).extent for loop in reduced]
    return not all(isinstance(n, tirx.IntImm) for n in extents) or math.prod(int(n) for n in extents) > _FEW


def _is_bound(stmt: Any) -> bool:
    """Tell whether everything that a statement computes is done by threads of the device."""
    if isinstance(stmt, tirx.For):
        return stmt.kind == tirx.ForKind.THREAD_BINDING or _is_bound(stmt.body)
    if isinstance(stmt, tirx.AttrStmt):
        return stmt.attr_key == "thread_extent" or _is_bound(stmt.body)
    if isinstance(stmt, tirx.SeqStmt):
        return all(_is_bound(one) for one in stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return _is_bound(stmt.then_case) and (stmt.else_case is None or _is_bound(stmt.else_case))
    if isinstance(stmt, s_tir.SBlockRealize):
        return _is_bound(stmt.block.body)
    return not isinstance(stmt, (tirx.BufferStore, tirx.Evaluate)) and _is_bound_within(stmt)


def _is_bound_within(stmt: Any) -> bool:
    body = getattr(stmt, "body", None)
    return body is None or _is_bound(body)
