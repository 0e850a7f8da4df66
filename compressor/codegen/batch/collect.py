"""Collect the kernels of a program, and the schedules that each could have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import tvm
from numpy.typing import NDArray
from torch.fx import GraphModule
from tvm import tirx
from tvm_ffi import structural_hash, structural_map

from compressor.codegen.device_tuning import varying
from compressor.codegen.lowering.compile import lower_graph
from compressor.codegen.lowering.kernel_set import KernelSet
from compressor.codegen.tuning import S, Tuner
from compressor.errors import UsageError
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter


@dataclass(frozen=True)
class Wanted:
    """One choice of a schedule that a program asks for.

    Attributes:
        kernel: its key: family, shape, format, and the number of tokens behind the last colon.
        schedules: the fields that vary, of each candidate, the default first.
        candidates: makes the kernel of a candidate, for any number of tokens.
        operands: shape, type and content of each argument of the kernel, as plain data: the input, the weight's parts,
            the output.
    """

    kernel: str
    schedules: Sequence[dict[str, Any]]
    candidates: Sequence[Callable[[], tirx.PrimFunc]]
    operands: Sequence[dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Tokens that candidates are timed on."""
        return int(self.kernel.rpartition(":")[2])


@dataclass
class Collector(Tuner):
    """Takes each space's first, and keeps what it was asked to choose from."""

    wanted: dict[str, Wanted] = field(default_factory=dict)

    def fastest(self, kernel: str, space: Sequence[S], build: Any, operands: Any, estimate: Any) -> S:
        """Return the default."""
        if len(space) > 1 and kernel not in self.wanted:
            arrays = operands()
            roles = ["input", *["weight"] * (len(arrays) - 2), "output"]
            described = [_describe(array, role) for array, role in zip(arrays, roles, strict=True)]
            makers = [_Maker(build, schedule) for schedule in space]
            self.wanted[kernel] = Wanted(kernel, varying(space), makers, described)
        return space[0]


@dataclass(frozen=True)
class _Maker:
    build: Callable[[Any], tirx.PrimFunc]
    schedule: Any

    def __call__(self) -> tirx.PrimFunc:
        return self.build(self.schedule)


def _describe(array: NDArray[Any], role: str) -> dict[str, Any]:
    """Describe an operand that holds one number everywhere."""
    fill = array.flat[0].item()
    assert np.all(array == fill)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "role": role, "fill": fill}


def collect(graph: GraphModule, tvm_target: tvm.target.Target, kernels: KernelSet) -> list[Wanted]:
    """Return the choices that lowering a compressed graph asks for, each once; its weights are not read.

    Raises:
        UsageError: there is nothing to choose.
    """
    collector = Collector("full", 1, None, "")
    lower_graph(with_memory(graph), tvm_target, kernels, collector)
    if not collector.wanted:
        raise UsageError("none of this model's kernels has schedules to choose from: there is nothing to tune")
    return list(collector.wanted.values())


def with_memory(graph: GraphModule) -> GraphModule:
    """Return a copy of a graph whose parameters have no data, with some that can be captured beside inputs."""
    graph = clone_graph(graph)
    for name, parameter in list(graph.named_parameters()):
        if parameter.is_meta:  # memory that nobody writes to is not taken
            set_parameter(graph, name, torch.empty(parameter.shape, dtype=parameter.dtype))
    return graph


def for_tokens(func: tirx.PrimFunc, tokens: int) -> tirx.PrimFunc:
    """Keep of a kernel what it does for so many tokens of one sequence.

    The host's conditions on the number of tokens are decided; the code for the device stays as it is, for any number.
    """
    batch, sequence, *_ = func.params[0].ty.shape
    analyzer = tvm.sym.Analyzer()

    def size(var: Any) -> Any:
        for known, value in ((batch, 1), (sequence, tokens)):
            if known.same_as(var):
                return tirx.IntImm("int64", value)
        return var

    def decide(branch: Any) -> Any:
        condition = analyzer.simplify(structural_map(branch.condition, (tvm.ir.Var, size)))
        if not isinstance(condition, tirx.IntImm):
            return branch
        taken = branch.then_case if int(condition) else branch.else_case
        return tirx.Evaluate(0) if taken is None else taken

    return func.with_body(structural_map(func.body, [(tirx.IfThenElse, decide)]))


def distinct(wanted: Wanted) -> tuple[dict[str, tirx.PrimFunc], list[str]]:
    """Write the TIR of all candidates of a choice.

    Returns:
        The functions by name, equal ones once; and the name of each candidate's function.
    """
    functions: dict[str, tirx.PrimFunc] = {}
    names: list[str] = []
    known: dict[int, str] = {}
    for index, make in enumerate(wanted.candidates):
        func = for_tokens(make(), wanted.tokens)
        name = known.setdefault(structural_hash(func), f"candidate_{index}")
        functions.setdefault(name, func.with_attr("global_symbol", name))
        names.append(name)
    return functions, names
