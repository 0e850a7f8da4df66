"""Steps of a program: nodes ready to run, and linears in place of products with constant matrices.

MatMul(x, weight) + bias        becomes   linear(x, weight^T, bias)
Gemm(x, weight, bias)           becomes   linear(x, weight, bias)
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.capture.onnx_in.values import Constant, Value
from compressor.errors import ModelFileError

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

LINEAR = "Linear"  # our step in place of MatMul and Gemm over a constant matrix


@dataclass
class Step:
    """One node, ready to run."""

    label: str
    op: str
    version: int
    attributes: dict[str, Any]
    inputs: list[str]
    outputs: list[str]
    path: str  # of its module, as its name tells; once it has a module, that one's


def node_path(node: NodeProto) -> str:
    """Return a module's path from names as PyTorch's exporter gives them: ``/model/layers.0/mlp/up_proj/MatMul``."""
    return re.sub(r"[^\w.]+", "_", ".".join(part for part in node.name.split("/") if part)).strip("._")


def count_readers(graph: GraphProto) -> Counter[str]:
    """Count who reads each value; the model's outputs are read too."""
    return Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])


def find_linears(steps: list[Step], known: dict[str, Constant], readers: Counter[str]) -> list[Step]:
    """Put linears in place of products with constant matrices, and take up the bias that is added to one alone."""
    result: list[Step] = []
    makers: dict[str, Step] = {}
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


def _linear(step: Step, known: dict[str, Constant]) -> Step | None:
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
    return Step(step.label, LINEAR, step.version, {}, inputs, step.outputs, step.path)


def _takes_bias(maker: Step | None, bias: str, known: dict[str, Constant], readers: Counter[str]) -> bool:
    """Return whether a step is a linear without a bias, read by one node alone, and a constant can be its bias."""
    if maker is None or maker.op != LINEAR or len(maker.inputs) > 2 or bias not in known:
        return False
    wide = known[bias].value
    return readers[maker.outputs[0]] == 1 and wide.shape == known[maker.inputs[1]].value.shape[:1]


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FIRST_PART = 8  # behind a recurrent node's own inputs: weight and bias of the linears that it consists of


def part_name(position: int) -> tuple[str, str]:
    """Return the linear, and its weight or bias, that an input behind a recurrent node's own is."""
    direction, part = divmod(position - FIRST_PART, 4)
    return f"{('input', 'hidden')[part // 2]}{direction or ''}", ("weight", "bias")[part % 2]


def split_recurrent(steps: list[Step], known: dict[str, Constant]) -> None:
    """Give recurrent steps their constant weights direction by direction, as the linears that they are.

    weights [directions, gates * width, in]     become   for each direction  [gates * width, in]
    biases [directions, 2 * gates * width]      become   for each direction  two of [gates * width]
    """
    for step in steps:
        if step.op not in GATES or not all(name in known for name in step.inputs[1:4] if name):
            continue
        held = [known[name] for name in step.inputs[1:4] if name]
        if any(constant.narrow for constant in held) or len(step.inputs) > FIRST_PART:
            continue
        inputs = [step.inputs[0], *[""] * 3, *step.inputs[4:]]
        inputs += [""] * (FIRST_PART - len(inputs))
        for direction in range(len(held[0].value)):
            for half, weight in enumerate(held[:2]):
                parts = [weight.value[direction]]
                if len(held) > 2:
                    parts.append(held[2].value[direction].chunk(2)[half])
                for part in parts:
                    name = f"{weight.name}[{direction}].{half}{part.dim()}"
                    known[name] = Constant(part, name)
                    inputs.append(name)
                inputs += [""] * (2 - len(parts))
        step.inputs = inputs


_UNSIGNED = (torch.uint16, torch.uint32)
_ANY = {"Cast", "CastLike", "Constant", "DequantizeLinear", "Flatten", "Identity", "Reshape", "Shape", "Size",
        "Squeeze", "Transpose", "Unsqueeze"}  # fmt: skip
_IN_INT64 = {"Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Clip", "Concat", "Expand", "Gather", "Pow", "Slice",
             "Split", "Sum", "Tile", "Where", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseAnd",
             "BitwiseOr", "BitwiseXor", "BitShift", "BitwiseNot"}  # fmt: skip


def widened(step: Step, inputs: list[Value | None]) -> tuple[list[Value | None], torch.dtype | None]:
    """Compute uint16 and uint32, on which PyTorch has few operators, in int64; also return the type to go back to."""
    dtypes = {x.dtype for x in (_tensor_of(x) for x in inputs) if x is not None}
    if step.op in _ANY or not dtypes & {*_UNSIGNED, torch.uint64}:
        return inputs, None
    if step.op not in _IN_INT64 or torch.uint64 in dtypes:
        raise ModelFileError(f"{step.label}: it computes with {' and '.join(sorted(map(str, dtypes)))}; convert these "
                             "to int64 or a float where the model is exported")  # fmt: skip
    narrow = next(d for d in _UNSIGNED if d in dtypes)
    wide: list[Value | None] = []
    for x in inputs:
        if isinstance(x, Constant) and x.value.dtype in _UNSIGNED:
            wide.append(Constant(x.value.to(torch.int64), x.name))
        else:
            wide.append(x.to(torch.int64) if isinstance(x, Tensor) and x.dtype in _UNSIGNED else x)
    return wide, narrow


def _tensor_of(value: Value | None) -> Tensor | None:
    return value.value if isinstance(value, Constant) else value if isinstance(value, Tensor) else None
