"""Lower FX by way of Relax to a program for browsers: the phases, and the check of stored bytes after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tvm
from numpy.typing import NDArray
from torch.fx import GraphModule
from tvm import relax

from compressor.capture.export import reexport
from compressor.codegen.isa import Isa
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.elementwise import ScheduleElementwise
from compressor.codegen.lowering.fusion import fuse
from compressor.codegen.lowering.importer import Importer, error_context, import_program
from compressor.codegen.lowering.phases import run_phases
from compressor.codegen.lowering.sizes import fixed_sizes
from compressor.codegen.tuning import Tuner
from compressor.codegen.web.converters.converter import WebConverter
from compressor.codegen.web.elementwise import generate
from compressor.codegen.web.kernels.argmax import argmax
from compressor.codegen.web.kernels.products import POLYFILLS, PRODUCT
from compressor.codegen.web.kernels.top_k import MOST, top_k
from compressor.codegen.web.program import WASM_BYTES, WGSL_BYTES, ProgramWriter, expression
from compressor.codegen.web.wasm import WasmModule, memory_flag, wasm_target
from compressor.errors import VerificationError
from compressor.graph.rules import listing

_SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "decoder": {"ids": ("B", "S"), "keep": ("R",), "k_cache_0": ("B", "", "T", "")},
    "encoder": {"ids": ("B", "S")},
}
"""Names of symbolic sizes, by input and dimension."""


@dataclass(frozen=True)
class WebProgram:
    """A program for browsers with its data.

    Attributes:
        content: inputs, output, scratch buffers, kernels and steps, as plain data; see docs/web.md.
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
    program = reexport(graph)
    info = graph.meta["model"]
    activations = fixed_sizes(program)
    _make_narrow(program.graph)
    mod, parameters = import_program(program, converter.table(), _NarrowImporter(info.kind == "decoder"))
    with target:
        mod = run_phases(mod, web_phases(), converter.smallest_packed, activations, dump)
    for x in _inputs(mod, parameters):
        if str(x.ty.dtype) not in ("float32", "int32"):
            raise VerificationError(f"input {x.name} has type {x.ty.dtype}; the target webgpu takes float32 and int64")
    writer = ProgramWriter(mod, converter.calls, partial(generate, target=target), WGSL_BYTES)
    content = _write(writer, mod, parameters, info.kind) | {"kernels": writer.kernels}
    if info.kind == "decoder":
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
    return WebProgram(content, _used(writer), writer.constants, kernels)


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
    converter = Converter(isa, Tuner("off", 1, None, isa.name))
    program = reexport(graph)
    info = graph.meta["model"]
    target = wasm_target(isa)
    module = WasmModule(isa)
    activations = fixed_sizes(program)
    outcomes = fuse(program.graph)
    if dump is not None:
        dump("fuse", listing(outcomes))
    mod, parameters = import_program(program, converter.table(), Importer(info.kind == "decoder"))
    with target:
        steps = [*web_phases(), ("schedule_elementwise", ScheduleElementwise())]
        mod = run_phases(mod, steps, converter.smallest_packed, activations, dump)
    writer = ProgramWriter(mod, {}, module.add, WASM_BYTES, "wasm_constant")
    content = _write(writer, mod, parameters, info.kind)
    known = {record["name"]: record for record in converter.records}
    kernels = [known.get(name) or {"name": name, "isa": isa.name, **writer.details[name]} for name in writer.kernels]
    with error_context("generate"):
        linked = module.link()
    return WebProgram(content | {"memory_flag": memory_flag(linked)}, _used(writer), writer.constants, kernels), linked


def _make_narrow(graph: torch.fx.Graph) -> None:
    """Make integers that the graph creates int32: WGSL has no wider ones."""
    for node in graph.nodes:
        value = node.meta.get("val")
        makes = node.op == "call_function" and any(argument.name == "dtype" for argument in _arguments(node.target))
        if makes and isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            node.kwargs = {**node.kwargs, "dtype": torch.int32}


def _arguments(target: Any) -> Any:
    schema = getattr(target, "_schema", None)
    return () if schema is None else schema.arguments


def _inputs(mod: tvm.IRModule, parameters: list[str]) -> list[Any]:
    return list(mod["main"].params)[: len(mod["main"].params) - len(parameters)]


def _write(writer: ProgramWriter, mod: tvm.IRModule, parameters: list[str], kind: str) -> dict[str, Any]:
    """Write the program and return its inputs, output, scratch buffers and steps."""
    inputs = _inputs(mod, parameters)
    names = _size_names(kind, inputs)
    references = [*(f"input:{x.name}" for x in inputs), *(f"parameter:{name}" for name in parameters)]
    with error_context("generate"):
        output, shape = writer.write(names, references)
    return {
        "inputs": [
            {"name": x.name, "dtype": str(x.ty.dtype), "shape": [expression(n, names) for n in x.ty.shape]}
            for x in inputs
        ],
        "output": output,
        "output_shape": shape,
        "scratch": writer.scratch,
        "steps": writer.steps,
    }


def _used(writer: ProgramWriter) -> list[str]:
    """Return the names of the parameters, in order of first use."""
    references = (b for step in writer.steps for b in step["buffers"] if b.startswith("parameter:"))
    return list(dict.fromkeys(b.partition(":")[2] for b in references))


def _size_names(kind: str, inputs: Any) -> dict[str, str]:
    """Map the inputs' symbolic sizes to their names in a program."""
    found: dict[str, str] = {}
    wanted = _SIZES.get(kind, {})
    for x in inputs:
        for axis, size in enumerate(x.ty.shape):
            if isinstance(size, tvm.ir.Var):
                given = wanted.get(x.name, ())
                name = given[axis] if axis < len(given) else ""
                if name or size.name not in found:
                    found[size.name] = name or found.get(size.name) or size.name
    return found


class _NarrowImporter(Importer):
    """Importer that makes integers int32: WGSL has no wider ones."""

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
