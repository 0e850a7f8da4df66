"""Compile the candidates of one choice into a shared library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from compressor.codegen.batch.collect import Wanted, distinct
from compressor.codegen.gpu.toolchain import check_device_module, device_code, usage_of
from compressor.codegen.isa import Isa
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.target import NativeTarget
from compressor.errors import ToolchainError, VerificationError


def compile_choice(wanted: Wanted, target: NativeTarget, isa: Isa, library: Path) -> dict[str, Any]:
    """Compile all candidates of a choice for the GPUs of ``isa`` into ``library``; return what a batch says of it.

    Candidates that do not compile are left out, and say why.

    Raises:
        ToolchainError: nvcc or a linker is missing, or all candidates fail to compile.
    """
    functions, names = distinct(wanted)
    refused: dict[str, str] = {}
    try:
        executable, usage = _compile(functions, target, isa)
    except (ToolchainError, VerificationError):
        for name, func in functions.items():  # which of them
            try:
                _compile({name: func}, target, isa)
            except (ToolchainError, VerificationError) as error:
                refused[name] = str(error).splitlines()[0][:200]
        if len(refused) == len(functions):
            raise
        executable, usage = _compile({n: f for n, f in functions.items() if n not in refused}, target, isa)

    def link(output: str, objects: Sequence[Any], **_options: Any) -> None:
        target.link(output, [str(name) for name in objects])

    link.output_format = "so"  # type: ignore[attr-defined]
    link.object_format = "o"  # type: ignore[attr-defined]
    executable.export_library(str(library), fcompile=link)
    candidates = [
        {"schedule": schedule, "function": name, **({"refused": refused[name]} if name in refused else usage[name])}
        for schedule, name in zip(wanted.schedules, names, strict=True)
    ]
    return {"kernel": wanted.kernel, "operands": list(wanted.operands), "candidates": candidates}


def _compile(
    functions: Mapping[str, tirx.PrimFunc], target: NativeTarget, isa: Isa
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Generate code; return TVM's executable, and what each function takes of a GPU."""
    with device_code(isa.archs) as usage:
        module = tvm.IRModule(dict(functions))
        executable = tvm.compile(module, target.tvm_target(isa), relax_pipeline=None, tir_pipeline=PIPELINE)
    check_device_module(executable, usage)
    return executable, {name: usage_of(name, usage) for name in functions}
