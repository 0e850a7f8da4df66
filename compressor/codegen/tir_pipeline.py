"""TVM's passes from TIR to code, without those that search for what our own kernels cannot have."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument
from tvm_ffi import structural_walk

PIPELINE = "compressor"
"""The pipeline's name, for :func:`tvm.compile` and :func:`tirx.build`."""


def has_blocks(func: tirx.PrimFunc) -> bool:
    """Return whether TVM made the function, of schedulable blocks; our kernels have none."""
    names: list[str] = []
    structural_walk(func.body, (s_tir.SBlock, lambda block: names.append(block.name_hint)))
    return any(name != "root" for name in names)


EXPLICIT_BARRIERS = "compressor.explicit_barriers"
"""Attribute of functions for a GPU that say where the threads of a block wait for each other, and wait nowhere else."""
_SMALLER_BUFFERS = "s_tir.CompactBufferAllocation"
"""The search for smaller buffers bounds every index, for up to 80% of the time of code generation."""
_BARRIERS = "s_tir.ThreadSync"
"""The search for missing barriers takes copies that are under way for reads, and refuses barriers it cannot place."""


@pass_instrument
class _Skipped:
    """Skip passes."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def should_run(self, _mod: Any, info: Any) -> bool:
        return info.name not in self.names


def _pipeline() -> tuple[Any, Any, Any]:
    lower, finish_host, finish_device = tirx.get_tir_pipeline("default")

    def lower_kernels(mod: tvm.IRModule, context: Any) -> tvm.IRModule:
        kinds: dict[tuple[str, ...], dict[Any, Any]] = {(): {}, (_SMALLER_BUFFERS,): {}, (_SMALLER_BUFFERS, _BARRIERS): {}}
        for var, func in mod.functions.items():
            is_explicit = EXPLICIT_BARRIERS in (func.attrs or {})
            ours = (_SMALLER_BUFFERS, _BARRIERS) if is_explicit else (_SMALLER_BUFFERS,)
            kinds[() if has_blocks(func) else ours][var] = func
        done = tvm.IRModule({}, attrs=mod.attrs)
        for names, functions in kinds.items():
            instruments = [*context.instruments, *([_Skipped(*names)] if names else [])]
            with tvm.transform.PassContext(
                context.opt_level, context.required_pass, context.disabled_pass, instruments, dict(context.config)
            ):
                done.update(lower(tvm.IRModule(functions, attrs=mod.attrs)) if functions else done)
        return done

    apply = tvm.transform.module_pass(lower_kernels, opt_level=0, name="LowerKernels")
    return apply, finish_host, finish_device


tirx.register_tir_pipeline(PIPELINE, _pipeline)
