"""FX -> Relax -> kernels: one readable list of phases, and a check of the stored bytes after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import tvm
from compressor_runtime import available_cores
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
from tvm_ffi import structural_walk

from compressor.capture.capture import reexport
from compressor.codegen.kernels import probe
from compressor.codegen.kernels.vector import Isa
from compressor.codegen.lowering.converters import Converter
from compressor.codegen.lowering.convolutions import fuse_convolutions
from compressor.codegen.lowering.elementwise import ScheduleElementwise
from compressor.codegen.lowering.fusion import fuse
from compressor.codegen.lowering.ordering import OrderShapeStores
from compressor.codegen.lowering.sizes import entry_bytes, fixed_sizes
from compressor.codegen.targets import NativeTarget, Target
from compressor.codegen.tuning import Tuner
from compressor.cpu import cpu_name
from compressor.errors import CompressorError, VerificationError

_CONSTANT_BYTES_ALLOWED = 1 << 16
"""Rotary frequencies and the like may be constants; weights may not."""

_PROBE = "read_bandwidth"
"""The function with which a bundle measures the memory it runs on."""


@dataclass(frozen=True)
class Library:
    """Compiled kernels and the program that calls them.

    Attributes:
        executable: TVM's executable.
        parameters: names of the parameters, in the order of the entry function's last argument, a tuple.
        kernels: one record a kernel: name, family, shape, format, schedule, evidence.
        isa: the instruction set that it needs.
        schedules: kernel and number of tokens -> fields of the chosen schedule, for the lock.
        tried: what the tuner timed, see :class:`compressor.codegen.tuning.Tuner`.
        notes: what the user should know.
        entry_bytes: of the largest value that one batch entry makes, of an encoder one token of it; 0 where inputs or
            outputs do not all begin with the batch, and of decoders.
    """

    executable: Any
    parameters: list[str]
    kernels: list[dict[str, Any]]
    isa: Isa
    schedules: dict[str, dict[str, Any]]
    tried: list[dict[str, Any]]
    notes: list[str]
    entry_bytes: int

    def save(self, path: Path, target: NativeTarget) -> None:
        """Link the shared library ``path``; raises ToolchainError."""

        def link(output: str, objects: Any, **_options: Any) -> None:
            target.link(output, [str(name) for name in objects])

        link.output_format = "so"  # type: ignore[attr-defined]
        link.object_format = "o"  # type: ignore[attr-defined]
        self.executable.export_library(str(path), fcompile=link)


def phases() -> list[tuple[str, tvm.transform.Pass]]:
    """The phases from the imported program to what the virtual machine runs.

    TVM's default list folds constants, which would evaluate packed weights back to dense ones; this one does not.
    """
    t = relax.transform
    return [
        ("bundle_parameters", t.BundleModelParams()),
        ("legalize", t.LegalizeOps()),
        ("annotate", t.AnnotateTIROpPattern()),
        ("fuse_ops", t.FuseOps()),
        ("fuse_tir", t.FuseTIR()),
        ("drop_dead_code", t.DeadCodeElimination()),
        ("rewrite_reshapes", t.RewriteDataflowReshape()),  # before schedules hide that they only copy
        ("schedule_elementwise", ScheduleElementwise()),
        ("leave_dataflow", t.ToNonDataflow()),
        ("drop_purity", t.RemovePurityChecking()),
        ("call_kernels", t.CallTIRRewrite()),
        ("plan_memory", t.StaticPlanBlockMemory()),
        ("allocate", t.LowerAllocTensor()),
        ("free", t.KillAfterLastUse()),
        ("lower_builtins", t.LowerRuntimeBuiltin()),
        ("compute_values", t.ComputePrimValue()),
        ("lower_shapes", t.VMShapeLower()),
        ("order_shapes", OrderShapeStores()),
        ("name_globals", t.AttachGlobalSymbol()),
    ]


def compile_graph(
    graph: GraphModule,
    target: Target,
    *,
    isa: Isa | None = None,
    tune: str = "quick",
    threads: int | None = None,
    pinned: Mapping[str, Mapping[str, Any]] | None = None,
    dump: Callable[[str, str], None] | None = None,
) -> Library:
    """Lower a graph and generate its kernels.

    Args:
        isa: instruction set of the kernels; None takes the target's.
        tune: ``off``, ``quick`` or ``full``.
        threads: threads that candidates are timed on, part of the tuning key; None takes the physical cores.
        pinned: ``Library.schedules`` of a locked run, in place of timing; None times.
        dump: called with (phase, text) after each phase.
    Raises:
        VerificationError: a phase turned packed weights into dense ones, or an operator has no lowering.
        DriftError: ``pinned`` are the schedules of other kernels.
        ToolchainError, UsageError: from the target.
    """
    base = target.resolve()
    isa = isa or base
    tvm_target = target.tvm_target(isa)
    runs_here = target.executes(isa)
    threads = threads or available_cores()
    machine = f"{isa.name}|{cpu_name()}|{threads} threads"
    suffix = "" if isa == base else f"@{isa.name}"
    tuner = Tuner(tune, threads, tvm_target if runs_here else None, machine, suffix=suffix, pinned=pinned)
    converter = Converter(isa, tuner)
    program = reexport(graph)
    fuse_convolutions(program.graph)
    activations, kind = fixed_sizes(program), graph.meta["model"].kind
    fuse(program.graph)
    mod, parameters = import_program(program, converter.table(), Importer(kind == "decoder"))
    mod = _add_probe(mod)
    with tvm_target:
        mod = run_phases(mod, phases(), converter.smallest_packed, activations, dump)
        with naming("generate"):
            executable = tvm.compile(mod, tvm_target, relax_pipeline=None)
    evidence = "executed" if runs_here else "compiled"
    kernels = [{**record, "evidence": evidence} for record in converter.records]
    part = 0 if kind == "decoder" else entry_bytes(program, tokens=kind == "encoder")
    return Library(executable, parameters, kernels, isa, tuner.chosen, tuner.tried, tuner.notes, part)


def run_phases(
    mod: tvm.IRModule,
    steps: Sequence[tuple[str, tvm.transform.Pass]],
    dense_elements: int | None,
    activations: Collection[int],
    dump: Callable[[str, str], None] | None,
) -> tvm.IRModule:
    """Run phases on an imported program, and :func:`check_storage` before them and after each."""
    check_storage(mod, "import", dense_elements, activations)
    for name, phase in steps:
        with naming(name):
            mod = phase(mod)
        check_storage(mod, name, dense_elements, activations)
        if dump is not None:
            dump(name, mod.script())
    return mod


@contextmanager
def naming(phase: str) -> Iterator[None]:
    """Errors of TVM become one of ours that names the phase; ours stay as they are."""
    try:
        yield
    except CompressorError:
        raise
    except Exception as error:  # TVM's importer and its passes raise whatever they stumble over
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise VerificationError(
            f"lowering, phase {phase}: TVM cannot lower this model: {reason}; report it with the output of --dump"
        ) from error


class Importer(ExportedProgramImporter):  # type: ignore[misc]
    """TVM's importer without copies of the parameters, and with bfloat16 parameters as their bits."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return tvm.runtime.empty((1,), "float32")  # dropped again: parameters stay inputs
        return tvm.runtime.tensor(tensor.detach().numpy())

    def create_input_vars(self, exported_program: ExportedProgram) -> Any:
        """Parameters of bfloat16 are uint16."""
        parameters, inputs, constraints = super().create_input_vars(exported_program)
        for name, var in parameters.items():
            if var.ty.dtype == "bfloat16":
                parameters[name] = relax.Var(name, relax.TensorType(var.ty.shape, "uint16"))
        return parameters, inputs, constraints

    def _flatten_output_args(self, output_args: Any) -> Any:
        # New keys and values are outputs in FX; here the attention kernels write them to the caches in place.
        flat = ExportedProgramImporter._flatten_output_args(output_args)
        return flat[:1] if self.decoder else flat


def import_program(
    program: ExportedProgram, converters: Mapping[str, Callable[..., Any]], importer: Importer
) -> tuple[tvm.IRModule, list[str]]:
    """The Relax program with parameters as inputs after the others, and their names."""
    kind = torch.export.graph_signature.InputKind
    with naming("import"):
        mod = importer.from_exported_program(
            program,
            keep_params_as_input=True,
            unwrap_unit_return_tuple=True,
            no_bind_return_tuple=False,
            custom_convert_map=converters,
        )
    mod["main"] = mod["main"].without_attr("params")
    specs = program.graph_signature.input_specs
    return mod, [str(spec.target) for spec in specs if spec.kind is kind.PARAMETER]


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


def check_storage(mod: tvm.IRModule, phase: str, dense_elements: int | None, activations: Collection[int] = ()) -> None:
    """Assert that a phase did not undo the compression ("what is claimed is stored").

    Constants must stay small, and nothing of fixed shape may be computed that has as many elements as the smallest
    packed weight has when dense: activations have symbolic shapes, so that would be a weight.

    Args:
        dense_elements: elements of the smallest packed weight; None when nothing is packed.
        activations: numbers of elements that may occur nevertheless, because the captured graph itself has values of
            that fixed size.
    Raises:
        VerificationError: names the phase and the tensor.
    """
    constant_bytes = 0
    materialised: list[str] = []

    def visit_constant(node: Any) -> None:
        nonlocal constant_bytes
        if isinstance(node.value, tvm.runtime.Tensor):
            constant_bytes += node.value.numpy().nbytes

    def visit_binding(node: Any) -> None:
        if dense_elements is None or not isinstance(node.value, tvm.ir.Call):
            return
        shape = getattr(node.var.ty, "shape", None)
        if shape is None or not all(isinstance(n, tvm.tirx.IntImm) for n in shape):
            return
        sizes = [int(n) for n in shape]
        if prod(sizes) >= dense_elements and prod(sizes) not in activations:
            materialised.append(f"{node.var.name} {sizes}")

    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and gvar.name_hint != _PROBE:
            structural_walk(func, [(tvm.ir.GenericConst, visit_constant), (relax.VarBinding, visit_binding)])
    if constant_bytes > _CONSTANT_BYTES_ALLOWED:
        raise VerificationError(
            f"lowering, phase {phase}: {constant_bytes} bytes of constants (allowed: {_CONSTANT_BYTES_ALLOWED}); "
            "weights were folded into the program"
        )
    if materialised:
        raise VerificationError(
            f"lowering, phase {phase}: a dense weight is computed at run time: {', '.join(materialised)}"
        )
