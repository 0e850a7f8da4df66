"""Lower FX by way of Relax to a program for browsers: the phases, and the check of stored bytes after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tvm
from numpy.typing import NDArray
from torch.fx import GraphModule
from tvm import relax

from compressor.codegen.isa import Isa
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.convolutions import fuse_convolutions
from compressor.codegen.lowering.elementwise import ScheduleElementwise
from compressor.codegen.lowering.entries import Entry, entries
from compressor.codegen.lowering.fusion import fuse
from compressor.codegen.lowering.importer import Importer, import_program, renamed_main
from compressor.codegen.lowering.kernel_set import cpu_kernels
from compressor.codegen.lowering.phases import error_context, run_phases
from compressor.codegen.lowering.sizes import fixed_sizes
from compressor.codegen.tuning import Tuner
from compressor.codegen.web.converters.converter import WebConverter
from compressor.codegen.web.elementwise import generate
from compressor.codegen.web.kernels.products import POLYFILLS, PRODUCT
from compressor.codegen.web.kernels.top_k import MOST, argmax, top_k
from compressor.codegen.web.program import WASM_BYTES, WGSL_BYTES, ProgramWriter, expression
from compressor.codegen.web.wasm import WasmModule, memory_flag, wasm_target
from compressor.errors import VerificationError
from compressor.graph.rules import Outcome, listing

_SIZES: dict[str, tuple[str, ...]] = {
    "ids": ("B", "S"),
    "keep": ("R",),
    "k_cache_0": ("B", "", "T", ""),
    "source": ("B", "N"),
    "source_mask": ("B", "N"),
}
"""Names of symbolic sizes, by input and dimension."""


@dataclass(frozen=True)
class WebProgram:
    """A program for browsers with its data.

    Attributes:
        content: inputs, output, scratch buffers, kernels and steps, as plain data; see docs/web.md.  Of an
            encoder-decoder, ``encode`` has those of the encoder; ``verify`` those that verify drafted tokens.
        parameters: names of the parameters, in order of first use.
        constants: arrays that the program itself holds, by name.
        kernels: one record per kernel for the manifest: name, family, format.
    """

    content: Mapping[str, Any]
    parameters: list[str]
    constants: Mapping[str, NDArray[Any]]
    kernels: list[dict[str, Any]]


def web_phases() -> list[tuple[str, tvm.transform.Pass]]:
    """Return the phases from the imported program to the calls that become dispatches."""
    t = relax.transform
    return [
        ("legalize", t.LegalizeOps()),
        ("annotate", t.AnnotateTIROpPattern()),
        ("fuse_ops", t.FuseOps()),
        ("fuse_tir", t.FuseTIR()),
        ("rewrite_reshapes", t.RewriteDataflowReshape()),  # reshapes become views
        ("drop_dead_code", t.DeadCodeElimination()),
    ]


def compile_program(
    graph: GraphModule, target: tvm.target.Target, dump: Callable[[str, str], None] | None = None
) -> WebProgram:
    """Lower a graph to WGSL.

    Args:
        target: TVM's target, with the limits that kernels must keep.
        dump: called with (phase, text) after each phase.
    Raises:
        UsageError: the target has no kernel for an operator or a format.
        VerificationError: a phase turned packed weights into dense ones, or something cannot be expressed in WGSL.
    """
    converter = WebConverter()
    info = graph.meta["model"]

    def prepare(entry: Entry) -> None:
        converter.verifies = entry.name == "verify"
        _make_narrow(entry.program.graph)

    mod, named, activations, _ = _import(entries(graph, only=("verify",)), converter, _NarrowImporter, prepare)
    with target:
        mod = run_phases(mod, web_phases(), converter.smallest_packed, activations, dump)
    for entry, names in named.items():
        for x in _inputs(mod, entry, names):
            if str(x.ty.dtype) not in ("float32", "int32"):
                raise VerificationError(
                    f"input {x.name} has type {x.ty.dtype}; the target webgpu takes float32 and int64"
                )
    writer = ProgramWriter(mod, converter.calls, partial(generate, target=target), WGSL_BYTES)
    content, used = _write(writer, mod, named)
    content["kernels"] = writer.kernels
    if info.generates:
        samplers = {"argmax": argmax(info.vocab_size), "top_k": top_k(info.vocab_size)}
        content["argmax"] = {"kernel": samplers["argmax"].name}
        content["top_k"] = {"kernel": samplers["top_k"].name, "most": MOST}
        for sampler in samplers.values():
            writer.kernels[sampler.name] = sampler.record()
            writer.details[sampler.name] = {"family": sampler.family}
    if any(PRODUCT in record["source"] for record in writer.kernels.values()):
        content["polyfills"] = POLYFILLS
    kernels = [{"name": name, **details} for name, details in writer.details.items()]
    if dump is not None:
        dump("wgsl", "\n".join(f"// {name}\n{record['source']}" for name, record in writer.kernels.items()))
    return WebProgram(content, used, writer.constants, kernels)


def compile_wasm(
    graph: GraphModule, isa: Isa, dump: Callable[[str, str], None] | None = None
) -> tuple[WebProgram, bytes]:
    """Lower a graph to WebAssembly, with the kernel generators of x86 at WebAssembly's instruction set.

    Returns:
        The program, whose kernels are functions of the module, and the module.

    Raises:
        ToolchainError: there is no linker.
        UsageError: the target has no kernel for an operator or a format.
        VerificationError: a phase turned packed weights into dense ones, or the module cannot be linked.
    """
    converter = Converter(cpu_kernels(isa), Tuner("off", 1, None, isa.name))
    target = wasm_target(isa)
    module = WasmModule(isa)
    mod, named, activations, outcomes = _import(entries(graph, only=("verify",)), converter, Importer, _fuse)
    if dump is not None:
        dump("fuse", listing(outcomes))
    with target:
        steps = [*web_phases(), ("schedule_elementwise", ScheduleElementwise())]
        mod = run_phases(mod, steps, converter.smallest_packed, activations, dump)
    writer = ProgramWriter(mod, {}, module.add, WASM_BYTES, "wasm_constant")
    content, used = _write(writer, mod, named)
    known = {record["name"]: record for record in converter.records}
    kernels = [known.get(name) or {"name": name, "isa": isa.name, **writer.details[name]} for name in writer.kernels]
    with error_context("generate"):
        linked = module.link()
    return WebProgram(content | {"memory_flag": memory_flag(linked)}, used, writer.constants, kernels), linked


def _import(
    given: Sequence[Entry],
    converter: Converter | WebConverter,
    importer: type[Importer],
    prepare: Callable[[Entry], Sequence[Outcome] | None],
) -> tuple[tvm.IRModule, dict[str, list[str]], set[int], list[Outcome]]:
    """Import a graph's entries into one module.

    Args:
        given: the entries, ``main`` last.
        prepare: called with each entry, whose graph it may change, before it is imported.
    Returns:
        The module, the names of the parameters of each entry, ``main`` last, the numbers of elements of values of fixed
        shape, and what ``prepare`` gave.
    """
    named, activations, outcomes, mod = dict[str, list[str]](), set[int](), list[Outcome](), None
    for entry in given:
        activations |= fixed_sizes(entry.program)
        outcomes += prepare(entry) or ()
        mod, named[entry.name] = import_program(entry.program, converter.table(), importer(entry.returned, mod))
        mod = mod if entry.name == "main" else renamed_main(mod, entry.name)
    return mod, named, activations, outcomes


def _fuse(entry: Entry) -> list[Outcome]:
    """Fuse operators as for x86, whose kernels these are."""
    return [*fuse_convolutions(entry.program.graph), *fuse(entry.program.graph)]


def _make_narrow(graph: torch.fx.Graph) -> None:
    """Make integers that the graph creates int32: WGSL has no wider ones."""
    for node in graph.nodes:
        value = node.meta.get("val")
        names = [argument.name for argument in _arguments(node.target)] if node.op == "call_function" else []
        if "dtype" in names and isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            place = names.index("dtype")
            if place < len(node.args):
                node.args = (*node.args[:place], torch.int32, *node.args[place + 1 :])
            else:
                node.kwargs = {**node.kwargs, "dtype": torch.int32}


def _arguments(target: Any) -> Any:
    schema = getattr(target, "_schema", None)
    return () if schema is None else schema.arguments


def _inputs(mod: tvm.IRModule, entry: str, parameters: list[str]) -> list[Any]:
    return list(mod[entry].params)[: len(mod[entry].params) - len(parameters)]


def _write(
    writer: ProgramWriter, mod: tvm.IRModule, named: Mapping[str, list[str]]
) -> tuple[dict[str, Any], list[str]]:
    """Write the entries, and return inputs, output, scratch buffers and steps of ``main``, those of another entry under
    its name, and the names of all parameters, in order of first use.
    """
    written, references = dict[str, dict[str, Any]](), list[str]()
    for entry, parameters in named.items():
        inputs = _inputs(mod, entry, parameters)
        names = _size_names(inputs)
        given = [*(f"input:{x.name}" for x in inputs), *(f"parameter:{name}" for name in parameters)]
        with error_context("generate"):
            outputs = writer.write(entry, names, given)
        written[entry] = {
            "inputs": [
                {"name": x.name, "dtype": str(x.ty.dtype), "shape": [expression(n, names) for n in x.ty.shape]}
                for x in inputs
            ],
            "outputs": [{"buffer": buffer, "shape": shape} for buffer, shape in outputs],
            "scratch": writer.scratch,
            "steps": writer.steps,
        }
        references += [b for step in writer.steps for b in step["buffers"]]
    content = written.pop("main")
    for one in (content, *(written[name] for name in written if name == "verify")):
        ((one["output"], one["output_shape"]),) = (tuple(out.values()) for out in one.pop("outputs"))
    for other in (written[name] for name in written if name == "encode"):  # it computes the last inputs of main
        count = len(other["outputs"])
        for out, target in zip(other["outputs"], content["inputs"][-count:], strict=True):
            out["name"] = target["name"]
    used = dict.fromkeys(name.partition(":")[2] for name in references if name.startswith("parameter:"))
    return content | written, list(used)


def _size_names(inputs: Any) -> dict[str, str]:
    """Map the inputs' symbolic sizes to their names in a program."""
    found: dict[str, str] = {}
    for x in inputs:
        for axis, size in enumerate(x.ty.shape):
            if isinstance(size, tvm.ir.Var):
                given = _SIZES.get(x.name, ())
                name = given[axis] if axis < len(given) else ""
                if name or size.name not in found:
                    found[size.name] = name or found.get(size.name) or size.name
    return found


class _NarrowImporter(Importer):
    """Importer that makes integers int32: WGSL has no wider ones."""

    integers = "int32"

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor: torch.Tensor) -> Any:
        return Importer._convert_pytorch_tensor_to_tvm(tensor.int() if tensor.dtype == torch.int64 else tensor)

    def create_input_vars(self, exported_program: Any) -> Any:
        parameters, inputs, constraints = super().create_input_vars(exported_program)
        for variables in (parameters, inputs):
            for name, var in variables.items():
                if str(var.ty.dtype) == "int64":
                    variables[name] = relax.Var(name, relax.TensorType(var.ty.shape, "int32"))
        return parameters, inputs, constraints
