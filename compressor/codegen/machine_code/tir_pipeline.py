"""TVM's passes from TIR to code, without those that search for what our own kernels cannot have."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument
from tvm_ffi import structural_walk

from compressor.codegen.machine_code.divisions import DivideSizes

PIPELINE = "compressor"
"""The pipeline's name, for :func:`tvm.compile` and :func:`tirx.build`."""


def has_blocks(func: tirx.PrimFunc) -> bool:
    """Return whether TVM made the function, of schedulable blocks; our kernels have none."""
    names: list[str] = []
    structural_walk(func.body, (s_tir.SBlock, lambda block: names.append(block.name_hint)))
    return any(name != "root" for name in names)


_SKIPPED = ("s_tir.CompactBufferAllocation", "s_tir.ThreadSync")


@pass_instrument
class _AsWritten:
    """Skip what our own kernels do not need.

    The search for smaller buffers bounds every index, for up to 80% of the time of code generation.  Barriers between
    the threads of a block stand where a kernel has them; TVM would add others, and refuses conditions around them.
    """

    def should_run(self, _mod: Any, info: Any) -> bool:
        return info.name not in _SKIPPED


def _pipeline() -> tuple[Any, Any, Any]:
    lower, finish_host, finish_device = tirx.get_tir_pipeline("default")

    def lower_kernels(mod: tvm.IRModule, context: Any) -> tvm.IRModule:
        ours = {var: func for var, func in mod.functions.items() if not has_blocks(func)}
        others = {var: func for var, func in mod.functions.items() if var not in ours}
        instruments = [*context.instruments, _AsWritten()]
        with tvm.transform.PassContext(
            context.opt_level, context.required_pass, context.disabled_pass, instruments, dict(context.config)
        ):
            done = lower(tvm.IRModule(ours, attrs=mod.attrs))
        if others:
            done.update(lower(tvm.IRModule(others, attrs=mod.attrs)))
        return done

    apply = tvm.transform.module_pass(lower_kernels, opt_level=0, name="LowerKernels")
    return apply, finish_host, lambda: tvm.transform.Sequential([DivideSizes(), finish_device()])


tirx.register_tir_pipeline(PIPELINE, _pipeline)
