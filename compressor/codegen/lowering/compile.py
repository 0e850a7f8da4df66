"""Lower FX to Relax to kernels: one readable list of phases, and a check of the stored bytes after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from compressor_runtime import available_cores
from torch.fx import GraphModule
from tvm import relax

from compressor.codegen.device_tuning import DeviceTuner
from compressor.codegen.isa import Isa
from compressor.codegen.kernels import probe
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.convolutions import fuse_convolutions
from compressor.codegen.lowering.entries import entries
from compressor.codegen.lowering.fusion import fuse
from compressor.codegen.lowering.importer import Importer, import_program, renamed_main
from compressor.codegen.lowering.kernel_set import KernelSet, cpu_kernels
from compressor.codegen.lowering.phases import _PROBE, error_context, run_phases
from compressor.codegen.lowering.sizes import entry_bytes, fixed_sizes
from compressor.codegen.remote_tuning import RemoteSession, RemoteTuner
from compressor.codegen.target import NativeTarget
from compressor.codegen.tuning import Tuner
from compressor.graph.rules import Outcome, listing
from compressor.host.machine import cpu_name


@dataclass(frozen=True)
class Library:
    """Compiled kernels and the program that calls them.

    Attributes:
        executable: TVM's executable.
        parameters: names of all parameters.
        entries: of each entry function, the indices of its parameters, in the order of its last argument, a tuple.
        kernels: one record a kernel: name, family, shape, format, schedule, evidence.
        isa: the instruction set that it needs.
        schedules: kernel and number of tokens -> fields of the chosen schedule, for the lock.
        tried: what the tuner timed, see :class:`compressor.codegen.tuning.Tuner`.
        notes: what the user should know.
        entry_bytes: of the largest value that one batch entry makes, of an encoder one token of it; 0 where inputs or
            outputs do not all begin with the batch, and of decoders.
        parts: what the entries that are parts of another take and give, in order, see
            :class:`compressor.graph.parts.cut.Part`.
    """

    executable: Any
    parameters: list[str]
    entries: dict[str, list[int]]
    kernels: list[dict[str, Any]]
    isa: Isa
    schedules: dict[str, dict[str, Any]]
    tried: list[dict[str, Any]]
    notes: list[str]
    entry_bytes: int
    parts: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path, target: NativeTarget) -> None:
        """Link the shared library ``path``; raises ToolchainError."""

        def link(output: str, objects: Any, **_options: Any) -> None:
            target.link(output, [str(name) for name in objects])

        link.output_format = "so"  # type: ignore[attr-defined]
        link.object_format = "o"  # type: ignore[attr-defined]
        self.executable.export_library(str(path), fcompile=link)


def compile_graph(
    graph: GraphModule,
    target: NativeTarget,
    *,
    isa: Isa | None = None,
    tune: str = "quick",
    threads: int | None = None,
    pinned: Mapping[str, Mapping[str, Any]] | None = None,
    kernels: Callable[[Isa], KernelSet] = cpu_kernels,
    dump: Callable[[str, str], None] | None = None,
    device: RemoteSession | None = None,
) -> Library:
    """Lower a graph and generate its kernels.

    Args:
        isa: instruction set of the kernels; None takes the target's.
        tune: ``off``, ``quick`` or ``full``.
        threads: threads that candidates are timed on, part of the tuning key; None takes the physical cores.
        pinned: ``Library.schedules`` of a locked run, in place of timing; None times.
        kernels: those of the target's kind of machine, for an instruction set.
        dump: called with (phase, text) after each phase.
        device: that candidates are timed on, in place of this machine; the target says what it executes.
    Raises:
        VerificationError: a phase turned packed weights into dense ones, or an operator has no lowering.
        DriftError: ``pinned`` are the schedules of other kernels.
        ToolchainError, UsageError: from the target.
    """
    base = target.resolve()
    isa = isa or base
    tvm_target = target.tvm_target(isa)
    runs_here, is_emulated = target.executes(isa), bool(target.launcher(isa))
    suffix = "" if isa == base else f"@{isa.name}"
    if device is not None:
        is_emulated = device.is_emulated
        timed_on = tvm_target if runs_here else None
        tuner: Tuner = RemoteTuner.make(tune, timed_on, isa, threads, suffix, pinned, device, target.link)
    elif isa.archs:
        tuner = DeviceTuner.make(tune, isa.archs, pinned)
    else:
        threads = threads or available_cores()
        timed_on = tvm_target if runs_here and not is_emulated else None
        tuner = Tuner(
            tune, threads, timed_on, f"{isa.name}|{cpu_name()}|{threads} threads", suffix=suffix, pinned=pinned
        )
    own = kernels(isa)
    lowered = lower_graph(graph, tvm_target, own, tuner, dump)
    with tvm_target, error_context("generate"):
        executable, known = own.generate(lowered.mod, tvm_target)
    evidence = "compiled" if not runs_here else "emulated" if is_emulated else "executed"
    where = {} if device is None or evidence == "compiled" else {"device": device.name}
    records = [{**record, **known(record["name"]), "evidence": evidence, **where} for record in lowered.kernels]
    part = lowered.entry_bytes
    parameters, used = lowered.parameters, lowered.entries
    return Library(
        executable, parameters, used, records, isa, tuner.chosen, tuner.tried, tuner.notes, part, lowered.parts
    )


@dataclass(frozen=True)
class Lowered:
    """Hold a program after all phases, before code is generated.

    Attributes:
        mod: what the virtual machine runs, and the kernels in TIR.
        parameters, entries: as of :class:`Library`.
        kernels: name, family, format, ... of each.
        entry_bytes, parts: as of :class:`Library`.
    """

    mod: tvm.IRModule
    parameters: list[str]
    entries: dict[str, list[int]]
    kernels: list[dict[str, Any]]
    entry_bytes: int
    parts: list[dict[str, Any]]


def lower_graph(
    graph: GraphModule,
    tvm_target: tvm.target.Target,
    kernels: KernelSet,
    tuner: Tuner,
    dump: Callable[[str, str], None] | None = None,
) -> Lowered:
    """Lower a graph through all phases, memory planned, without generating code.

    Args:
        tvm_target: that phases ask for limits.
        kernels: that operators become calls of, and the phases.
        tuner: that chooses the kernels' schedules.
        dump: called with (phase, text) after each phase.
    Raises:
        VerificationError: a phase turned packed weights into dense ones, or an operator has no lowering.
        DriftError: the tuner's pinned schedules are those of other kernels.
    """
    converter = Converter(kernels, tuner)
    kind = graph.meta["model"].kind
    outcomes, activations, named, mod = list[Outcome](), set[int](), dict[str, list[str]](), None
    parts: list[dict[str, Any]] = []
    for entry in entries(graph):
        program = entry.program
        parts += [] if entry.part is None else [entry.part.facts()]
        outcomes += fuse_convolutions(program.graph)
        activations |= fixed_sizes(program)
        outcomes += fuse(program.graph)
        importer = Importer(entry.returned, mod)
        mod, named[entry.name] = import_program(program, converter.table(), importer)
        mod = mod if entry.name == "main" else renamed_main(mod, entry.name)
    if dump is not None:
        dump("fuse", listing(outcomes))
    mod = _add_probe(mod) if kernels.measures_memory else mod
    with tvm_target:
        mod = run_phases(mod, kernels.phases(), converter.smallest_packed, activations, dump)
    part = 0 if graph.meta["model"].generates else entry_bytes(program, tokens=kind == "encoder")
    parameters = list(dict.fromkeys(name for names in reversed(named.values()) for name in names))  # main's first
    used = {entry: [parameters.index(name) for name in names] for entry, names in named.items()}
    return Lowered(mod, parameters, used, list(converter.records), part, parts)


def _add_probe(mod: tvm.IRModule) -> tvm.IRModule:
    """Add the probe of the memory's read bandwidth."""
    bb = relax.BlockBuilder(mod)
    x = relax.Var("x", relax.TensorType([probe.PARTS, tvm.tirx.Var("n", "int64"), 4, 16], "int32"))
    with bb.function(_PROBE, [x]):
        kernel = bb.add_func(probe.read_bandwidth(), "probe_read_bandwidth")
        with bb.dataflow():
            out = relax.TensorType([probe.PARTS, 16], "int32")
            y = bb.emit_output(relax.call_tir(kernel, [x], out_ty=out))
        bb.emit_func_output(y)
    return bb.finalize()
