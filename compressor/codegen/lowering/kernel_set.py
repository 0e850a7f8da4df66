"""Say which kernels and which phases a program is lowered with: those of CPUs here, those of GPUs in their folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import tvm

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import dense, embedding, experts, norm
from compressor.codegen.kernels.attention import cached, kept, packed, tree
from compressor.codegen.kernels.attention.cross import cross_attention
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.n_of_m import n_of_m_linear
from compressor.codegen.kernels.n_of_m import supports as n_of_m_supports
from compressor.codegen.kernels.skipping.linear import skipping_linear
from compressor.codegen.kernels.top_k import top_k
from compressor.codegen.lowering.phases import phases
from compressor.codegen.machine_code.objects import build_executable
from compressor.formats.extras import KeptOfGroup, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

Maker = Callable[..., tvm.tirx.PrimFunc]
Generate = Callable[[tvm.IRModule, tvm.target.Target], tuple[Any, Callable[[str], dict[str, Any]]]]
Phases = Callable[[], list[tuple[str, tvm.transform.Pass]]]
TUNED_TOKENS = 64
"""Schedules for CPUs are chosen for one token, and then for so many."""
_REMEMBERED = 48
"""Packed linears whose TIR is kept, for candidates that are timed one after another: to write one takes 0.1 s."""


@dataclass(frozen=True)
class Choice:
    """One choice that the tuner makes for a kernel.

    Attributes:
        tokens: that candidates are timed on.
        space: schedules that differ in what so many tokens take, the default first, given the schedule chosen so far;
            None before the first choice.
        estimate: seconds that a model foresees for a schedule, for machines that are not here.
    """

    tokens: int
    space: Callable[[Any], list[Any]]
    estimate: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class LinearKernels:
    """Kernels of linears, and the schedules that the tuner chooses from.

    Attributes:
        make: the kernel; its last positional argument is a schedule.
        choices: what the tuner chooses, one after another, for (rows, columns, format or storage type); the last
            choice's schedule has them all.
        common: (schedule, rows of each weight, format) -> the schedule of several weights in one kernel.
        writes_part: ``make`` takes ``only``, a number of tokens, and then writes the kernel for these alone.
    """

    make: Maker
    choices: Callable[..., Sequence[Choice]]
    common: Callable[..., Any] = lambda schedule, _rows, _fmt: schedule
    writes_part: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Hold what converters and lowering know of a kind of machine.

    The makers take what those of :mod:`compressor.codegen.kernels` take, without the instruction set, and their kernels
    have the same parameters.

    Attributes:
        isa: in records of kernels, and for families that only CPUs have.
        phases: from the imported program to what the virtual machine runs.
        dense: linears of stored floats.
        packed: linears of stored codes.
        tree_attention, packed_tree_attention: of drafted tokens; None where these are among ``missing``.
        kept_attention, packed_kept_attention: of kept tokens; likewise.
        others: linears of formats that are laid out in another way, by the extra that says so; they have no schedule.
        missing: operators that CPUs have kernels for and this machine has none, with their families in words.
        supports: says what the packed linears and embeddings do not read of a format; an empty text if they read all.
        generate: (lowered module, TVM's target) -> TVM's executable, and a function from a kernel's name to what is
            known of its code, for its record.
        measures_memory: the library has a function that measures the memory's read bandwidth.
    """

    isa: Isa
    phases: Phases
    dense: LinearKernels
    packed: LinearKernels
    dense_routed: Maker
    packed_routed: Maker
    norm: Maker
    embedding: Maker
    packed_embedding: Maker
    top_k: Maker
    cached_attention: Maker
    masked_attention: Maker
    cross_attention: Maker
    pack_cache: Maker
    packed_attention: Maker
    tree_attention: Maker | None = None
    packed_tree_attention: Maker | None = None
    kept_attention: Maker | None = None
    packed_kept_attention: Maker | None = None
    others: Mapping[type[Any], Maker] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    supports: Callable[[Format], str]
    generate: Generate
    measures_memory: bool = True


def _generate(mod: tvm.IRModule, target: tvm.target.Target) -> tuple[Any, Callable[[str], dict[str, Any]]]:
    """Generate a CPU's code; nothing is known of it."""
    return build_executable(mod, target), lambda _name: {}


def _dense_choices(_rows: int, _columns: int, _storage: str) -> list[Choice]:
    """Return what the tuner chooses for a linear of stored floats."""
    many = Choice(TUNED_TOKENS, lambda schedule: dense.gemm_space(schedule.gemv_rows))
    return [Choice(1, lambda _schedule: dense.gemv_space()), many]


_written_linear = lru_cache(_REMEMBERED)(packed_linear.fused_linear)


def cpu_kernels(isa: Isa) -> KernelSet:
    """Return the kernels for a CPU's instruction set."""

    def fused_linear(
        rows: Sequence[int], columns: int, fmt: Format, has_bias: bool, schedule: Any, **ends: Any
    ) -> tvm.tirx.PrimFunc:
        return _written_linear(tuple(rows), columns, fmt, has_bias, isa, schedule, **ends)

    def packed_routed(
        routing: Any, rows: int, columns: int, fmt: Format, has_bias: bool, schedule: Any
    ) -> tvm.tirx.PrimFunc:
        return experts.packed_routed_linear(routing, rows, columns, fmt, has_bias, isa, schedule)

    def packed_choices(rows: int, _columns: int, fmt: Format) -> list[Choice]:
        tiles = -(-rows // TILE_ROWS)

        def many(schedule: Any) -> list[Any]:
            return packed_linear.gemm_space(tiles, schedule.gemv_tiles, fmt, isa)

        return [Choice(1, lambda _schedule: packed_linear.gemv_space(tiles, fmt, isa)), Choice(TUNED_TOKENS, many)]

    def other(make: Maker) -> Maker:
        def linear(rows: Any, columns: Any, fmt: Any, has_bias: bool, **ends: Any) -> tvm.tirx.PrimFunc:
            return make(rows, columns, fmt, has_bias, isa, **ends)

        return linear

    return KernelSet(
        isa=isa,
        phases=phases,
        dense=LinearKernels(dense.dense_linear, _dense_choices),
        packed=LinearKernels(
            fused_linear,
            packed_choices,
            lambda schedule, rows, fmt: packed_linear.common_schedule(schedule, rows, fmt, isa),
            writes_part=True,
        ),
        dense_routed=partial(experts.dense_routed_linear, gemv_rows=dense.gemv_space()[0].gemv_rows),
        packed_routed=packed_routed,
        norm=norm.norm,
        embedding=embedding.embedding,
        packed_embedding=partial(embedding.packed_embedding, isa=isa),
        top_k=top_k,
        cached_attention=cached.cached_attention,
        masked_attention=cached.masked_attention,
        cross_attention=cross_attention,
        pack_cache=packed.pack_cache,
        packed_attention=packed.packed_attention,
        tree_attention=tree.tree_attention,
        packed_tree_attention=tree.packed_tree_attention,
        kept_attention=kept.kept_attention,
        packed_kept_attention=kept.packed_kept_attention,
        supports=lambda fmt: packed_linear.supports(fmt, isa) or n_of_m_supports(fmt),
        generate=_generate,
        others={KeptOfGroup: other(n_of_m_linear), SkippedInputs: other(skipping_linear)},
    )
