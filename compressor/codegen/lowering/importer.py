"""Import an exported program into Relax, with parameters as inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from compressor.codegen.lowering.converters.picking import picks_by_mask
from compressor.codegen.lowering.phases import error_context
from compressor.errors import CaptureError, CompressorError, first_line
from compressor.graph.provenance import module_path, source_line

_NOT_LOWERED = ("sort", "argsort", "topk", "lstm", "gru")
"""Operators that TVM imports and cannot generate code for, or only for one length."""


def check_operators(graph: fx.GraphModule, ours: Collection[str]) -> None:
    """Refuse a graph with an operator that cannot be lowered.

    Args:
        ours: names of the operators that do not go through TVM's importer.
    Raises:
        CaptureError: names the operator, and the module and the line that it comes from.
    """
    known = {*ExportedProgramImporter().create_convert_map(), *ours}
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node.op != "call_function":
            continue
        where = _place(node)
        if picks_by_mask(node):
            raise CaptureError(
                f"{where}: picks by a mask, and how many it picks is unknown; multiply by it, or use where"
            )
        if name not in known or name.partition(".")[0] in _NOT_LOWERED:
            raise CaptureError(
                f"{where}: the operator {name} has no kernel; write it with basic ones, or capture the part of the "
                "model around it"
            )


def _place(node: fx.Node) -> str:
    """Return the module and the line that a node comes from."""
    return " at ".join(filter(None, (module_path(node), source_line(node)))) or node.name


def _named(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Let a converter's errors say which operator of the model it was that has no kernel, and where it stands."""

    def converted(node: fx.Node, *importer: Any) -> Any:
        try:
            return convert(node, *importer)
        except CompressorError:
            raise
        except Exception as error:  # TVM's converters raise whatever they stumble over
            name = getattr(node.target, "__name__", str(node.target))
            raise CaptureError(
                f"{_place(node)}: the operator {name} has no kernel as it is called here ({first_line(error)}); write "
                "it with basic ones, or capture the part of the model around it"
            ) from error

    return converted


class Importer(ExportedProgramImporter):  # type: ignore[misc]
    """TVM's importer without copies of the parameters, and with bfloat16 parameters as their bits.

    Args:
        results: outputs that there are beside new keys and values; None where there are none of these.
        beside: functions that are there already; kernels of theirs are used again.
    """

    integers = "int64"
    """Type of the whole numbers that the program computes."""

    def __init__(self, results: int | None, beside: tvm.IRModule | None = None) -> None:
        self._beside = beside
        super().__init__()
        self.results = results

    @property
    def block_builder(self) -> relax.BlockBuilder:
        """The builder of the module, which TVM's importer makes anew for each program."""
        return self._builder

    @block_builder.setter
    def block_builder(self, builder: relax.BlockBuilder) -> None:
        self._builder = builder if self._beside is None else relax.BlockBuilder(self._beside)

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return tvm.runtime.empty((1,), "float32")  # dropped again: parameters stay inputs
        return tvm.runtime.tensor(tensor.detach().numpy())

    def create_input_vars(self, exported_program: ExportedProgram) -> Any:
        """Type bfloat16 parameters as uint16, their bits."""
        parameters, inputs, constraints = super().create_input_vars(exported_program)
        for name, var in parameters.items():
            if var.ty.dtype == "bfloat16":
                parameters[name] = relax.Var(name, relax.TensorType(var.ty.shape, "uint16"))
        return parameters, inputs, constraints

    def _flatten_output_args(self, output_args: Any) -> Any:
        # New keys and values are outputs in FX; here the attention kernels write them to the caches in place.
        flat = ExportedProgramImporter._flatten_output_args(output_args)
        return flat[: self.results]


def import_program(
    program: ExportedProgram, converters: Mapping[str, Callable[..., Any]], importer: Importer
) -> tuple[tvm.IRModule, list[str]]:
    """Return the Relax program, with parameters as inputs after the others, and their names.

    Raises:
        CaptureError: names the operator that cannot be converted, and the module and the line that it comes from.
    """
    importer.convert_map = {name: _named(convert) for name, convert in importer.convert_map.items()}
    kind = torch.export.graph_signature.InputKind
    with error_context("import"):
        mod = importer.from_exported_program(
            program,
            keep_params_as_input=True,
            unwrap_unit_return_tuple=True,
            no_bind_return_tuple=False,
            custom_convert_map={name: _named(convert) for name, convert in converters.items()},
        )
    mod["main"] = mod["main"].without_attr("params")
    specs = program.graph_signature.input_specs
    return mod, [str(spec.target) for spec in specs if spec.kind is kind.PARAMETER]


def renamed_main(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """Give the entry another name, so that a module can have several."""
    functions = dict(mod.functions.items())
    main = next(gvar for gvar in functions if gvar.name_hint == "main")
    functions[tvm.ir.GlobalVar(name)] = functions.pop(main).with_attr("global_symbol", name)
    return tvm.IRModule(functions)
