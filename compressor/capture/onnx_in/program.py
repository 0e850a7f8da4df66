"""Turn a checked ONNX model into a module: constants are folded once, the other nodes run one after another.

    Constant, Transpose(weight), DequantizeLinear(codes), ...   become   constants, before the export
    MatMul(x, weight) + bias, Gemm(x, weight, bias)             become   linear(x, weight^T, bias)
    Shape, Gather, Concat, ... of sizes                         become   symbols, while the export traces
"""

from __future__ import annotations

import inspect
import operator as python
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compressor.capture.onnx_in.model import OnnxModel, node_name
from compressor.capture.onnx_in.operators.table import load
from compressor.capture.onnx_in.sizes import compute_sizes
from compressor.capture.onnx_in.stored import NARROW
from compressor.capture.onnx_in.values import Call, Constant, Numbers, Value
from compressor.errors import CaptureError, ModelFileError, first_line

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto

_LINEAR = "Linear"  # our step in place of MatMul and Gemm over a constant matrix


@dataclass
class _Step:
    """One node, ready to run."""

    label: str
    op: str
    version: int
    attributes: dict[str, Any]
    inputs: list[str]
    outputs: list[str]
    path: str  # of the module that the node's name tells


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
        graph = model.graph
        for proto in graph.initializer:
            self._known[proto.name] = Constant(model.tensor(proto), proto.name, proto.data_type in NARROW)
        self._inputs = [value.name for value in graph.input if value.name not in self._known]
        self._outputs = [value.name for value in graph.output]
        self.input_names = _identifiers(self._inputs)
        steps = [step for node in graph.node if (step := self._fold(model, node)) is not None]
        self._steps = _linears(steps, self._known, _readers(graph))
        for step in self._steps:
            self._hold_constants(step)
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in self.input_names]
        run = self.run

        def forward(*args: Tensor) -> Any:
            return run(*args)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def run(self, *args: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the model's output, or its outputs by name."""
        values: dict[str, Value] = {**self._known, **dict(zip(self._inputs, args, strict=True))}
        for step in self._steps:
            inputs = [values[name] if name else None for name in step.inputs]
            values.update(zip(step.outputs, self._apply(step, inputs, self._held), strict=False))
        results = {name: _as_tensor(values[name]) for name in self._outputs}
        return next(iter(results.values())) if len(results) == 1 else results

    def _apply(self, step: _Step, inputs: list[Value | None], hold: Any) -> tuple[Value, ...]:
        """Run one node; whatever goes wrong is told with its name."""
        call = Call(step.op, step.version, step.attributes, inputs, len(step.outputs), hold)
        try:
            result = compute_sizes(call)
            if result is None:
                result = self._table[step.op](call)
        except CaptureError as error:
            raise ModelFileError(f"{step.label}: {error}") from error
        except Exception as error:
            shapes = ", ".join("-" if x is None else _shape(x) for x in inputs)
            raise ModelFileError(
                f"{step.label} cannot be captured for inputs of {shapes}: {type(error).__name__}: "
                f"{first_line(error, 'no reason given')}; check the node, or give an example of the inputs"
            ) from error
        results = result if isinstance(result, tuple) else (result,)
        if len(results) < len(step.outputs) and any(step.outputs[len(results) :]):
            raise ModelFileError(f"{step.label}: its output {len(results)} is not computed here")
        return results

    def _fold(self, model: OnnxModel, node: NodeProto) -> _Step | None:
        """Return the node's step, or None where all that it reads is known, so that its outputs are now."""
        from onnx import defs

        version = 1 if node.domain else defs.get_schema(node.op_type, model.opset, "").since_version
        attributes = {a.name: _attribute(model, a) for a in node.attribute}
        step = _Step(node_name(node), node.op_type, version, attributes, list(node.input), list(node.output), _path(node))
        if not all(name in self._known for name in step.inputs if name):
            return step
        with torch.no_grad():
            inputs: list[Value | None] = [self._known[name] if name else None for name in step.inputs]
            results = self._apply(step, inputs, lambda constant: constant.value)
        for name, value in zip(step.outputs, results, strict=False):
            if name:
                narrow = isinstance(value, Constant) and value.narrow
                self._known[name] = Constant(_as_tensor(value, lambda c: c.value), name, narrow)
        return None

    def _hold_constants(self, step: _Step) -> None:
        for position, name in enumerate(step.inputs):
            if name in self._known:
                wanted = ""
                if step.op == _LINEAR and step.path:
                    wanted = f"{step.path}.{('', 'weight', 'bias')[position]}"
                self._hold(self._known[name], wanted)

    def _hold(self, constant: Constant, wanted: str) -> None:
        """Make a constant a parameter (float32, more than one element) or a buffer; once for equal places in memory."""
        value = constant.value
        key = _key(value)
        if key in self._paths:
            return
        base = re.sub(r"[^\w.]+", "_", constant.name).strip("._") or "constant"
        if wanted and not base.endswith((".weight", ".bias")):
            base = wanted
        path = self._paths[key] = self._free_path(base)
        owner, _, leaf = path.rpartition(".")
        holder: nn.Module = self
        for part in filter(None, owner.split(".")):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        if value.dtype == torch.float32 and value.numel() > 1:
            holder.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        else:
            holder.register_buffer(leaf, value)

    def _free_path(self, path: str) -> str:
        """Return a path of attributes that nothing else has, beginning with the one that is wanted."""
        parts = [part if not part[0].isdigit() or part.isdigit() else f"_{part}" for part in path.split(".") if part]
        holder: Any = self
        for index, part in enumerate(parts[:-1]):
            if part in holder._modules:
                holder = holder._modules[part]
            elif hasattr(holder, part):
                return self._free_path("_".join([*parts[: index + 1], ""]) + "." + ".".join(parts[index + 1 :]))
            else:
                return ".".join(parts) if not hasattr(nn.Module, parts[-1]) else ".".join([*parts[:-1], parts[-1] + "_"])
        leaf = parts[-1]
        while hasattr(holder, leaf):
            leaf += "_"
        return ".".join([*parts[:-1], leaf])

    def _held(self, constant: Constant) -> Tensor:
        """Return a constant as the export sees it: PyTorch puts fake tensors in the place of parameters."""
        path = self._paths.get(_key(constant.value))
        return constant.value if path is None else python.attrgetter(path)(self)


def _as_tensor(value: Value, hold: Any = None) -> Tensor:
    if isinstance(value, Constant):
        return value.value
    return value.tensor() if isinstance(value, Numbers) else value


def _shape(value: Value) -> str:
    held = value.value if isinstance(value, Constant) else value
    shape = held.values.shape if isinstance(held, Numbers) else held.shape
    return str([int(size) if isinstance(size, int) else str(size) for size in shape])


def _key(value: Tensor) -> tuple[Any, ...]:
    return (value.data_ptr() if value.numel() else id(value), tuple(value.shape), value.stride(), value.dtype)


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


def _path(node: NodeProto) -> str:
    """Return a module's path from names as PyTorch's exporter gives them: ``/model/layers.0/mlp/up_proj/MatMul``."""
    parts = [part for part in node.name.split("/") if part]
    if len(parts) > 1 and parts[-1].startswith(node.op_type):
        parts.pop()
    return re.sub(r"[^\w.]+", "_", ".".join(parts)).strip("._")


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


def _readers(graph: GraphProto) -> Counter[str]:
    return Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])


def _linears(steps: list[_Step], known: dict[str, Constant], readers: Counter[str]) -> list[_Step]:
    """Put linears in place of products with constant matrices, and take up the bias that is added to one alone."""
    result: list[_Step] = []
    makers: dict[str, _Step] = {}
    for step in steps:
        linear = _linear(step, known)
        if linear is None and step.op == "Add":
            pairs = [step.inputs, step.inputs[::-1]]
            found = next((pair for pair in pairs if _takes_bias(makers.get(pair[0]), pair[1], known, readers)), None)
            if found is not None:
                maker = makers.pop(found[0])
                maker.inputs.append(found[1])
                maker.outputs = step.outputs
                makers[step.outputs[0]] = maker
                continue
        step = linear or step
        result.append(step)
        makers[step.outputs[0]] = step
    return result


def _linear(step: _Step, known: dict[str, Constant]) -> _Step | None:
    """Return the linear that a node is, or None."""
    get = step.attributes.get
    if step.op not in ("MatMul", "Gemm") or len(step.inputs) < 2 or step.inputs[1] not in known:
        return None
    weight = known[step.inputs[1]]
    bias = step.inputs[2] if len(step.inputs) > 2 else ""
    plain = not get("transA", 0) and get("alpha", 1.0) == 1.0 and get("beta", 1.0) == 1.0
    if not plain or weight.value.dim() != 2 or not weight.value.is_floating_point() or weight.narrow:
        return None
    rows = weight.value if step.op == "Gemm" and get("transB", 0) else weight.value.t()
    if bias and (bias not in known or known[bias].value.shape != rows.shape[:1]):
        return None
    name = step.inputs[1] if rows is weight.value else f"{step.inputs[1]}^T"
    known[name] = Constant(rows, weight.name)
    inputs = [step.inputs[0], name, *([bias] if bias else [])]
    return _Step(step.label, _LINEAR, step.version, {}, inputs, step.outputs, step.path)


def _takes_bias(maker: _Step | None, bias: str, known: dict[str, Constant], readers: Counter[str]) -> bool:
    """Return whether a step is a linear without a bias, read by one node alone, and a constant can be its bias."""
    if maker is None or maker.op != _LINEAR or len(maker.inputs) > 2 or bias not in known:
        return False
    wide = known[bias].value
    return readers[maker.outputs[0]] == 1 and wide.shape == known[maker.inputs[1]].value.shape[:1]


