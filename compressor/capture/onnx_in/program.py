"""Turn a checked ONNX model into a module: constants are folded once, the other nodes run one after another.

Constant, Transpose(weight), DequantizeLinear(codes), ...   become   constants, before the export
MatMul(x, weight) + bias, Gemm(x, weight, bias)             become   linear(x, weight^T, bias)
Shape, Gather, Concat, ... of sizes                         become   symbols, while the export traces
"""

from __future__ import annotations

import inspect
import operator as python
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from compressor.capture.onnx_in.model import OnnxModel, node_name
from compressor.capture.onnx_in.operators.table import load
from compressor.capture.onnx_in.places import HALVES, WITH_WEIGHTS, place_constant, place_key, place_step
from compressor.capture.onnx_in.sizes import compute_sizes
from compressor.capture.onnx_in.steps import (
    FIRST_PART,
    GATES,
    Step,
    count_readers,
    find_linears,
    node_path,
    part_name,
    split_recurrent,
    widened,
)
from compressor.capture.onnx_in.stored import DTYPES, NARROW
from compressor.capture.onnx_in.values import Call, Constant, Numbers, Value
from compressor.errors import CaptureError, ModelFileError, first_line

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto


class OnnxProgram(nn.Module):
    """Run a model's nodes in PyTorch; parameters are the model's weights, where they lie.

    Attributes:
        input_names: of the arguments of forward, in order, as identifiers.
    """

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        table = load()
        self._table = table
        self._known: dict[str, Constant] = {}
        self._paths: dict[tuple[Any, ...], str] = {}
        self._operations: set[str] = set()
        graph = model.graph
        for proto in graph.initializer:
            self._known[proto.name] = Constant(model.tensor(proto), proto.name, proto.data_type in NARROW)
        self._inputs = [value.name for value in graph.input if value.name not in self._known]
        self._outputs = {value.name: value.type.tensor_type.elem_type for value in graph.output}
        self.input_names = _identifiers(self._inputs)
        steps = [step for node in graph.node if (step := self._fold(model, node)) is not None]
        self._steps = find_linears(steps, self._known, count_readers(graph))
        split_recurrent(self._steps, self._known)
        for step in self._steps:
            self._place(step)
        for name in self._outputs:
            if name in self._known and (key := place_key(self._known[name].value)) not in self._paths:
                self._paths[key] = place_constant(self, self._known[name], "")
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in self.input_names]
        run = self.run

        def forward(*args: Tensor) -> Any:
            return run(*args)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def run(self, *args: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the model's output, or its outputs by name."""
        values: dict[str, Value] = {**self._known, **dict(zip(self._inputs, map(_single, args), strict=True))}
        for step in self._steps:
            inputs = [values[name] if name else None for name in step.inputs]
            done = self._run_step(step, inputs, self._held)
            values.update(zip(step.outputs, map(_single, done), strict=False))
        results = {name: self._result(values[name], kind) for name, kind in self._outputs.items()}
        return next(iter(results.values())) if len(results) == 1 else results

    def _run_step(self, step: Step, inputs: list[Value | None], hold: Any) -> tuple[Value, ...]:
        """Run one node; whatever goes wrong is told with its name."""
        inputs, narrowed = widened(step, inputs)
        call = Call(step.op, step.version, step.attributes, inputs, len(step.outputs), hold)
        try:
            sizes = compute_sizes(call)
            result = self._compute(step, call) if sizes is None else sizes
        except CaptureError as error:
            raise ModelFileError(f"{step.label}: {error}") from error
        except Exception as error:
            shapes = ", ".join("-" if x is None else _shape(x) for x in inputs)
            raise ModelFileError(
                f"{step.label} cannot be captured for inputs of {shapes}: {type(error).__name__}: "
                f"{first_line(error, 'no reason given')}; check the node, or give an example of the inputs"
            ) from error
        results: tuple[Value, ...] = result if isinstance(result, tuple) else (result,)
        if narrowed is not None:
            same = isinstance(results[0], Tensor) and results[0].dtype == torch.int64
            results = tuple(x.to(narrowed) if same and isinstance(x, Tensor) else x for x in results)
        if len(results) < len(step.outputs) and any(step.outputs[len(results) :]):
            raise ModelFileError(f"{step.label}: its output {len(results)} is not computed here")
        return results

    def _compute(self, step: Step, call: Call) -> Value | tuple[Value, ...]:
        """Run a definition: in the step's module, or right now where sizes turned out to be plain numbers."""
        definition = self._table[step.op]
        known = [None if x is None else _settled(x) for x in call.inputs]
        if len(known) and all(x is None or y is not None for x, y in zip(call.inputs, known, strict=True)):
            with _disable_current_modes(), torch.no_grad():
                settled: list[Value | None] = [
                    None if x is None or y is None else y() for x, y in zip(call.inputs, known, strict=True)
                ]
                done = definition(replace(call, inputs=settled, hold=lambda constant: constant.value))
                results = done if isinstance(done, tuple) else (done,)
                return tuple(Constant(x, name) if isinstance(x, Tensor) else x
                             for x, name in zip(results, step.outputs, strict=False))  # fmt: skip
        if step.path not in self._operations:
            return definition(call)
        module = self.get_submodule(step.path)
        result: Value | tuple[Value, ...] = module(definition, replace(call, module=module))
        return result

    def _fold(self, model: OnnxModel, node: NodeProto) -> Step | None:
        """Return the node's step, or None where all that it reads is known, so that its outputs are now."""
        from onnx import defs

        version = 1 if node.domain else defs.get_schema(node.op_type, model.opset, "").since_version
        attributes = {a.name: _attribute(model, a) for a in node.attribute}
        step = Step(
            node_name(node), node.op_type, version, attributes, list(node.input), list(node.output), node_path(node)
        )
        if not all(name in self._known for name in step.inputs if name):
            return step
        with torch.no_grad():
            inputs: list[Value | None] = [self._known[name] if name else None for name in step.inputs]
            results = self._run_step(step, inputs, lambda constant: constant.value)
        for name, value in zip(step.outputs, results, strict=False):
            if name:
                narrow = isinstance(value, Constant) and value.narrow
                self._known[name] = Constant(_as_tensor(value), name, narrow)
        return None

    def _place(self, step: Step) -> None:
        """Give a step a module, and its constants paths: beside the module where they are its weight and bias."""
        weights = step.op in WITH_WEIGHTS and step.inputs[1] in self._known
        step.path = place_step(self, step, self._known)
        self._operations.add(step.path)
        for position, name in enumerate(step.inputs):
            if name in self._known and (key := place_key(self._known[name].value)) not in self._paths:
                wanted = f"{step.path}.{('', 'weight', 'bias')[position]}" if weights and 0 < position < 3 else ""
                if step.op in GATES and position >= FIRST_PART:
                    child, leaf = part_name(position)
                    wanted = f"{step.path}.{child}.{leaf}"
                self._paths[key] = place_constant(self, self._known[name], wanted)

    def stored(self) -> dict[str, Tensor]:
        """Return the weights in half precision, for which the module has float32 parameters without values."""
        values = {place_key(c.value): c.value for c in self._known.values() if c.value.dtype in HALVES}
        names = {name for name, _ in self.named_parameters()}
        return {self._paths[key]: value for key, value in values.items() if self._paths.get(key) in names}

    def _held(self, constant: Constant) -> Tensor:
        """Return a constant as the export sees it: PyTorch puts fake tensors in the place of parameters."""
        path = self._paths.get(place_key(constant.value))
        return constant.value if path is None else python.attrgetter(path)(self)

    def _result(self, value: Value, kind: int) -> Tensor:
        """Return an output, in the half precision that the file states for it."""
        x = self._held(value) if isinstance(value, Constant) else _as_tensor(value)
        return x.to(DTYPES[kind]) if DTYPES.get(kind) in HALVES and x.dtype == torch.float32 else x


def _settled(value: Value) -> Callable[[], Constant] | None:
    """Return what makes a constant of a value that is known by now; None where it is not."""
    if isinstance(value, Constant):
        return lambda: value
    if isinstance(value, Numbers) and all(isinstance(n, int) for n in value.values.reshape(-1)):
        return lambda: Constant(value.tensor(), "size")
    return None


def _single(value: Value) -> Value:
    """Widen half precision: arithmetic is float32."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _as_tensor(value: Value) -> Tensor:
    if isinstance(value, Constant):
        return value.value
    return value.tensor() if isinstance(value, Numbers) else value


def _shape(value: Value) -> str:
    held = value.value if isinstance(value, Constant) else value
    shape = held.values.shape if isinstance(held, Numbers) else held.shape
    return str([int(size) if isinstance(size, int) else str(size) for size in shape])


def _attribute(model: OnnxModel, attribute: AttributeProto) -> Any:
    """Return an attribute as plain values; tensors as they are stored."""
    from onnx import helper

    if attribute.HasField("t"):
        value = model.tensor(attribute.t)
        return Constant(value, "", attribute.t.data_type in NARROW)
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type == attribute.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return list(value) if attribute.type in (attribute.INTS, attribute.FLOATS) else value


def _identifiers(names: list[str]) -> list[str]:
    """Return names of arguments: identifiers, no two equal."""
    result: list[str] = []
    for name in names:
        clean = re.sub(r"\W", "_", name)
        clean = f"input_{clean}" if not clean.isidentifier() or clean in ("self", "forward") else clean
        while clean in result:
            clean += "_"
        result.append(clean)
    return result
