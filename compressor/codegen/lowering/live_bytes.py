"""Count the memory that a program's values take at once, as its memory is planned.

    alloc_storage s, alloc_tensor t in s, kernel(..., t), v = reshape t, kill_tensor t, kill_storage s, kill_tensor v
    '------------------- s is held -----------------------------------------------------------------------------'

A storage is given back once the plan has dropped it and all tensors in it, views included.  Kernels' own scratch is a
few tiles, and is not counted; neither are parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import tvm
from torch.fx import GraphModule
from tvm_ffi import structural_map

from compressor.codegen.lowering.compile import lower_graph
from compressor.codegen.lowering.kernel_set import cpu_kernels
from compressor.codegen.target import Target
from compressor.codegen.tuning import Tuner

_PLANNED = "free"
"""The phase behind which storages and tensors begin and end."""


def live_bytes(graph: GraphModule, target: Target, with_inputs: bool) -> int:
    """Return the most bytes that are held at once as a graph's program runs on a batch of one.

    Args:
        with_inputs: inputs count until they are read for the last time, as those of a stretch of a larger program do.
    Raises:
        VerificationError: as :func:`compressor.codegen.lowering.compile.lower_graph`.
    """
    isa = target.resolve()
    kernels = cpu_kernels(isa)
    phases = kernels.phases()
    until = [name for name, _ in phases].index(_PLANNED) + 1
    planned = replace(kernels, phases=lambda: phases[:until], measures_memory=False)
    lowered = lower_graph(graph, target.tvm_target(isa), planned, Tuner("off", 1, None, ""))
    return _most_held(lowered.mod["main"], with_inputs)


def _most_held(function: Any, with_inputs: bool) -> int:
    """Walk the statements of a planned function, and return the most that is held."""
    statements = [binding for block in function.body.blocks for binding in block.bindings]
    reads = [[arg for arg in _args(one.value) if isinstance(arg, tvm.ir.Var)] for one in statements]
    inputs = list(function.params)[:-1] if with_inputs else []
    last = {one: max((i for i, vars_ in enumerate(reads) if one in vars_), default=-1) for one in inputs}
    held = {one: _input_bytes(one) for one in inputs}
    users: dict[Any, set[Any]] = {}  # storage -> the tensors in it, and itself until the plan drops it
    of_tensor: dict[Any, Any] = {}
    most = sum(held.values())
    for i, (statement, vars_) in enumerate(zip(statements, reads, strict=True)):
        name, var = _operator(statement.value), statement.var
        if name == "alloc_storage":
            held[var], users[var] = _size(statement.value.args[0]), {var}
        elif name == "alloc_tensor" or (name == "reshape" and vars_[0] in of_tensor):
            of_tensor[var] = of_tensor.get(vars_[0], vars_[0])
            users[of_tensor[var]].add(var)
        elif name in ("kill_tensor", "kill_storage") and (storage := of_tensor.get(vars_[0], vars_[0])) in users:
            users[storage].discard(vars_[0])
            if not users[storage]:
                del held[storage]
        most = max(most, sum(held.values()))
        for one in inputs:
            if last[one] == i:
                del held[one]
    return most


def _args(value: Any) -> Iterator[Any]:
    yield from value.args if isinstance(value, tvm.ir.Call) else ()


def _operator(value: Any) -> str:
    """Return the name of a call of an operator; nothing for kernels and others."""
    name = getattr(value.op, "name", "") if isinstance(value, tvm.ir.Call) else ""
    return str(name).rpartition(".")[2]


def _input_bytes(var: Any) -> int:
    return _size(var.ty.shape) * int(tvm.DataType(str(var.ty.dtype)).bits) // 8


def _size(shape: Any) -> int:
    """Return the product of some sizes, where those that vary are 1."""
    return prod(_number(size) for size in getattr(shape, "values", shape))


def _number(size: Any) -> int:
    """Return a size, with 1 in the place of what varies."""
    one = structural_map(size, (tvm.ir.Var, lambda var: tvm.tirx.IntImm(str(var.ty.dtype), 1)))
    return int(tvm.sym.Analyzer().simplify(one))
