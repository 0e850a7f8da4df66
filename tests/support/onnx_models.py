"""Small ONNX models, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

node = helper.make_node


def make_model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Sequence[str],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    checked: bool = True,
) -> ModelProto:
    """Return a model; inputs have these sizes (numbers, or names of those that vary), outputs any."""
    weights = weights or {}
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [w if isinstance(w, TensorProto) else numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    if checked:
        model = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(model, full_check=True)
    return model


def write(model: ModelProto, folder: Path, **options: Any) -> Path:
    """Write a model as ``model.onnx``."""
    file = folder / "model.onnx"
    onnx.save(model, file, **options)
    return file


def reference(model: ModelProto, **inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return what onnx's own evaluator computes."""
    return ReferenceEvaluator(model).run(None, inputs)


def convnet(opset: int = 17) -> ModelProto:
    """Return convolution, ReLU, pooling, a reshape by computed sizes, and two linears; the batch varies."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    weights = {
        "conv.weight": weight(8, 3, 3, 3),
        "conv.bias": weight(8),
        "onnx::MatMul_7": weight(32, 8 * 16).T.copy(),
        "hidden.bias": weight(32),
        "head.weight": weight(10, 32),
        "zero": np.array(0),
        "first": np.array([0]),
        "rest": np.array([-1]),
    }
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], name="/conv/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"], name="/relu/Relu"),
        node("MaxPool", ["b"], ["c"], name="/pool/MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Shape", ["c"], ["sizes"], name="/Shape"),
        node("Gather", ["sizes", "zero"], ["batch"], name="/Gather", axis=0),
        node("Unsqueeze", ["batch", "first"], ["batch1"], name="/Unsqueeze"),
        node("Concat", ["batch1", "rest"], ["flat"], name="/Concat", axis=0),
        node("Reshape", ["c", "flat"], ["d"], name="/Reshape"),
        node("MatMul", ["d", "onnx::MatMul_7"], ["e"], name="/hidden/MatMul"),
        node("Add", ["hidden.bias", "e"], ["f"], name="/hidden/Add"),
        node("Gemm", ["f", "head.weight"], ["y"], name="/head/Gemm", transB=1),
    ]
    return make_model(nodes, {"x": ["batch", 3, 8, 8]}, ["y"], weights, opset=opset)


def recurrent(op: str, directions: int = 1, steps: int = 1, **attributes: Any) -> ModelProto:
    """Return a recurrent layer with its states as inputs and outputs, and a linear on its last state."""
    rng = np.random.default_rng(3)
    gates, wide, width = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 16, 32

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) / 4).astype(np.float32)

    weights = {
        "w": weight(directions, gates * width, wide),
        "r": weight(directions, gates * width, width),
        "b": weight(directions, 2 * gates * width),
        "head.weight": weight(1, width),
        "zero": np.array(0),
    }
    states = ["h", "c"] if op == "LSTM" else ["h"]
    names = [f"{state}_next" for state in states]
    attributes["direction"] = "bidirectional" if directions == 2 else "forward"
    nodes = [
        node(op, ["x", "w", "r", "b", "", *states], ["ys", *names], name="/rnn", hidden_size=width, **attributes),
        node("Gather", ["h_next", "zero"], ["last"], axis=0),
        node("Gemm", ["last", "head.weight"], ["z"], name="/head/Gemm", transB=1),
        node("Sigmoid", ["z"], ["p"]),
    ]
    inputs: dict[str, list[Any]] = {"x": [steps, "batch", wide]}
    inputs |= {state: [directions, "batch", width] for state in states}
    return make_model(nodes, inputs, ["p", *names], weights)
