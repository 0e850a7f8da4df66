"""Say which kernels and which phases a program for GPUs is lowered with, and generate its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm

from compressor.codegen.gpu import rows
from compressor.codegen.gpu.attention import kernels as attention
from compressor.codegen.gpu.attention import packed as packed_caches
from compressor.codegen.gpu.experts.kernel import dense_routed_linear, packed_routed_linear
from compressor.codegen.gpu.linear import dense, packed
from compressor.codegen.gpu.lower import ScheduleThreads
from compressor.codegen.gpu.spaces import dense_choices, packed_choices
from compressor.codegen.gpu.sparse import columns, n_of_m
from compressor.codegen.gpu.toolchain import check_device_module, device_code, usage_of
from compressor.codegen.isa import Isa
from compressor.codegen.lowering.kernel_set import KernelSet, LinearKernels
from compressor.codegen.lowering.phases import phases
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.formats.format import Format

_CONVOLUTIONS, _STATES, _TREES = "convolutions", "layers with a state", "drafted tokens (`speculate`)"
_KEPT = "layers that run kept tokens alone (the pass swift_kv)"
MISSING = {
    "patches.default": _CONVOLUTIONS,
    "depthwise_linear.default": _CONVOLUTIONS,
    "packed_depthwise.default": _CONVOLUTIONS,
    "causal_convolution.default": _STATES,
    "selective_scan.default": _STATES,
    "gated_delta_rule.default": _STATES,
    "wkv.default": _STATES,
    "tree_attention.default": _TREES,
    "packed_tree_attention.default": _TREES,
    "kept_attention.default": _KEPT,
    "packed_kept_attention.default": _KEPT,
}
"""Operators without a kernel here, each with its family in words."""


def gpu_phases() -> list[tuple[str, tvm.transform.Pass]]:
    """List the phases: those of CPUs, with threads where those have vectors, in functions outside our families."""
    own = {"schedule_elementwise": ("schedule_threads", ScheduleThreads())}
    return [own.get(name, (name, step)) for name, step in phases()]


def _supports(fmt: Format) -> str:
    """Say what linears do not read of a format; an empty text if they read all."""
    if fmt.extra(KeptOfGroup) is not None:
        return n_of_m.supports(fmt)
    return packed.supports(fmt) if fmt.extra(ColumnBlocks) is None else columns.supports(fmt)


def gpu_kernels(isa: Isa) -> KernelSet:
    """Return the kernels for GPUs, whose code is generated for ``isa.archs``."""
    return KernelSet(
        isa=isa,
        phases=gpu_phases,
        dense=LinearKernels(dense.dense_linear, dense_choices),
        packed=LinearKernels(packed.fused_linear, packed_choices),
        dense_routed=dense_routed_linear,
        packed_routed=packed_routed_linear,
        norm=rows.norm,
        embedding=rows.embedding,
        packed_embedding=rows.packed_embedding,
        top_k=rows.top_k,
        cached_attention=attention.cached_attention,
        masked_attention=attention.masked_attention,
        cross_attention=attention.cross_attention,
        pack_cache=packed_caches.pack_cache,
        packed_attention=packed_caches.packed_attention,
        missing=MISSING,
        others={KeptOfGroup: n_of_m.n_of_m_linear, ColumnBlocks: columns.column_blocks_linear},
        supports=_supports,
        generate=partial(_generate, isa),
        measures_memory=False,
    )


def _generate(isa: Isa, mod: tvm.IRModule, target: tvm.target.Target) -> tuple[Any, Callable[[str], dict[str, Any]]]:
    """Generate code of the host and of GPUs; what ptxas says of a kernel's functions goes into its record."""
    with device_code(isa.archs) as usage:
        executable = tvm.compile(mod, target, relax_pipeline=None, tir_pipeline=PIPELINE)
    check_device_module(executable, usage)
    return executable, lambda name: usage_of(name, usage)
