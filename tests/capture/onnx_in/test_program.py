"""ONNX files as graphs: linears are found and named, sizes that vary stay symbolic, constants are folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_models import convnet, make_model, node, recurrent, reference, write
from torch.export import Dim
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.export import reexport
from compressor.errors import ModelFileError
from compressor.graph.sites import linear_sites

RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(graph: GraphModule, *inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    results = graph(*(torch.from_numpy(x) for x in inputs))
    return [x.detach().numpy() for x in (results if isinstance(results, tuple) else (results,))]


def operators(graph: GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("opset", [13, 17, 21, 23])
def test_a_convolutional_network(opset: int, tmp_path: Path) -> None:
    model = convnet(opset)
    graph = capture(write(model, tmp_path))
    info = graph.meta["model"]
    assert (info.kind, info.name) == ("module", "model.onnx")
    assert [(s.name, s.module_class) for s in linear_sites(graph)] == [
        ("conv", "Conv2d"), ("hidden", "Linear"), ("head", "Linear"),
    ]  # fmt: skip
    assert operators(graph).count("compressor.dense_linear.default") == 3 and "aten.add.Tensor" not in operators(graph)
    for batch in (1, 5):
        x = floats(batch, 3, 8, 8)
        np.testing.assert_allclose(run(graph, x)[0], reference(model, x=x)[0], rtol=1e-4, atol=1e-5)
    reexport(graph)


def test_without_weights_nothing_is_read_but_shapes(tmp_path: Path) -> None:
    graph = capture(write(convnet(), tmp_path), weights=False)
    assert graph.get_parameter("head.weight").is_meta
    assert graph.get_parameter("head.weight").shape == (10, 32)


def test_half_precision_is_kept_and_arithmetic_is_float32(tmp_path: Path) -> None:
    table, weight = floats(20, 8).astype(np.float16), floats(8, 6).astype(np.float16)
    nodes = [
        node("Gather", ["table", "i"], ["a"], name="embed"),
        node("MatMul", ["a", "w"], ["b"], name="head"),
        node("Mul", ["b", "scale"], ["y"]),
    ]
    graph_proto = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("i", TensorProto.INT64, ["batch", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "w"),
         numpy_helper.from_array(np.array(0.5, np.float16), "scale")],
    )  # fmt: skip
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    graph = capture(write(model, tmp_path))
    (site,) = linear_sites(graph)
    assert graph.get_parameter(site.weight_name).dtype == graph.get_parameter("table").dtype == torch.float16
    index = RNG.integers(0, 20, (3, 5))
    (got,) = run(graph, index)
    assert got.dtype == np.float16
    exact = table.astype(np.float64)[index] @ weight.astype(np.float64) * 0.5
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2**-10, atol=1e-6)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["table", "i"], ["a"], name="/embed/Gather"),
        node("Transpose", ["table"], ["t"], perm=[1, 0]),
        node("MatMul", ["a", "t"], ["y"], name="/head/MatMul"),
    ]
    model = make_model(nodes, {"x": [1]}, ["y"], {"table": floats(20, 8)}, checked=False)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("i", TensorProto.INT64, [4]))
    graph = capture(write(model, tmp_path))
    assert [name for name, _ in graph.named_parameters()] == ["table"]
    (site,) = linear_sites(graph)
    assert site.tied and site.name == "head"


def quantised(kind: int) -> tuple[ModelProto, np.ndarray[Any, Any]]:
    """Return a linear over a quantised weight, and the dense weight that it stands for, in float64."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    codes = RNG.integers(0, 8, (8, 6)).astype(dtype)
    scale, zero = np.abs(floats(6)) + 0.1, RNG.integers(0, 4, 6).astype(dtype)
    weights = {name: numpy_helper.from_array(x, name) for name, x in (("q", codes), ("s", scale), ("z", zero))}
    nodes = [node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1), node("MatMul", ["x", "w"], ["y"], name="head")]
    dense = (codes.astype(np.float64) - zero.astype(np.float64)) * scale
    return make_model(nodes, {"x": ["batch", 8]}, ["y"], weights, opset=21), dense


@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.UINT8, TensorProto.UINT4, TensorProto.INT4])
def test_quantised_weights_are_read_exactly(kind: int, tmp_path: Path) -> None:
    model, dense = quantised(kind)
    graph = capture(write(model, tmp_path))
    (site,) = linear_sites(graph)
    assert np.array_equal(graph.get_parameter(site.weight_name).detach().numpy(), dense.T.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [True, False])
def test_matmul_nbits_is_read_exactly(bits: int, with_zeros: bool, tmp_path: Path) -> None:
    rows, columns, block = 3, 40, 16  # the last block is not full
    blocks = -(-columns // block)
    codes = RNG.integers(0, 1 << bits, (rows, blocks * block))
    zeros = RNG.integers(0, 1 << bits, (rows, blocks)) if with_zeros else np.full((rows, blocks), 1 << (bits - 1))
    scales = floats(rows, blocks)
    packed = codes.astype(np.uint8) if bits == 8 else (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    odd = np.pad(zeros, ((0, 0), (0, blocks % 2)))
    points = zeros.astype(np.uint8) if bits == 8 else (odd[:, ::2] | odd[:, 1::2] << 4).astype(np.uint8)
    weights = {"q": packed.reshape(rows, blocks, -1), "s": scales.reshape(-1)}
    weights |= {"z": points.reshape(-1)} if with_zeros else {}
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    nodes = [node("MatMulNBits", ["x", *weights], ["y"], name="head", domain="com.microsoft", **attributes)]
    model = make_model(nodes, {"x": ["batch", columns]}, ["y"], weights, checked=False)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    graph = capture(write(model, tmp_path))
    x = floats(4, columns)
    dense = ((codes - np.repeat(zeros, block, 1)) * np.repeat(scales.astype(np.float64), block, 1))[:, :columns]
    np.testing.assert_allclose(run(graph, x)[0], x @ dense.T, rtol=1e-4, atol=1e-4)


def test_sizes_that_vary_are_named_and_bounded(tmp_path: Path) -> None:
    """A table of 16 positions, from which as many are taken as the sequence is long."""
    nodes = [
        node("Shape", ["x"], ["s"], start=1, end=2),
        node("Slice", ["table", "zero", "s", "zero"], ["p"]),
        node("Add", ["x", "p"], ["y"]),
    ]
    weights = {"table": floats(16, 4), "zero": np.array([0])}
    model = make_model(nodes, {"x": ["batch", "sequence", 4]}, ["y"], weights)
    graph = capture(write(model, tmp_path))
    _, (sizes,) = graph.meta["inputs"]
    assert [size.__name__ for size in sizes.values()] == ["batch", "sequence"] and sizes[1].max == 16
    for shape in ((1, 1, 4), (3, 16, 4)):
        x = floats(*shape)
        np.testing.assert_array_equal(run(graph, x)[0], reference(model, x=x)[0])


def test_a_size_that_cannot_vary_is_told_and_an_example_helps(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "shape"], ["y"])]
    model = make_model(nodes, {"x": ["batch", "width"]}, ["y"], {"shape": np.array([2, 12])})
    file = write(model, tmp_path)
    with pytest.raises(ModelFileError, match=r"cannot vary freely.*give an example of the inputs"):
        capture(file)
    graph = capture(file, (torch.zeros(4, 6),))
    assert run(graph, floats(4, 6))[0].shape == (2, 12)


def test_an_input_without_a_shape_asks_for_an_example(tmp_path: Path) -> None:
    model = make_model([node("Relu", ["x"], ["y"])], {"x": [2]}, ["y"])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    file = write(model, tmp_path)
    with pytest.raises(ModelFileError, match="states no number of dimensions; give an example"):
        capture(file)
    shapes = ({0: Dim("n", min=1)},)
    graph = capture(file, (torch.zeros(4, 6),), dynamic_shapes=shapes)
    assert run(graph, floats(7, 6))[0].shape == (7, 6)


def test_what_operators_must_know_ahead_is_named(tmp_path: Path) -> None:
    nodes = [node("ReduceSum", ["x"], ["n"], name="count", keepdims=0), node("Cast", ["n"], ["c"], to=7),
             node("Reshape", ["x", "c1"], ["y"], name="unfold"), node("Unsqueeze", ["c", "zero"], ["c1"])]  # fmt: skip
    model = make_model([nodes[0], nodes[1], nodes[3], nodes[2]], {"x": [6]}, ["y"], {"zero": np.array([0])})
    with pytest.raises(ModelFileError, match="Reshape 'unfold': the sizes are computed while the model runs"):
        capture(write(model, tmp_path))


def test_several_outputs_have_their_names(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["logits"]), node("Neg", ["x"], ["other.output"])]
    graph = capture(write(make_model(nodes, {"x": [2]}, ["logits", "other.output"]), tmp_path))
    assert graph.meta["outputs"] == ["logits", "other.output"]


@pytest.mark.parametrize(
    ("op", "directions", "attributes", "packed"),
    [
        ("RNN", 1, {}, ["input", "hidden"]),
        ("GRU", 1, {"linear_before_reset": 1}, ["input", "hidden"]),
        ("GRU", 1, {"linear_before_reset": 0}, ["input"]),  # the gate comes between the state and a part of the weight
        ("LSTM", 1, {}, ["input", "hidden"]),
        ("LSTM", 2, {}, ["input", "hidden", "input1", "hidden1"]),
    ],
)
def test_recurrent_layers_are_linears(
    op: str, directions: int, attributes: dict[str, int], packed: list[str], tmp_path: Path
) -> None:
    model = recurrent(op, directions, steps=3, **attributes)
    graph = capture(write(model, tmp_path))
    sites = {site.name.partition("@")[0] for site in linear_sites(graph)}
    assert sites == {"head", *(f"rnn.{name}" for name in packed)}
    inputs = {value.name: floats(*(d.dim_value or 4 for d in value.type.tensor_type.shape.dim))
              for value in model.graph.input}  # fmt: skip
    for got, expected in zip(run(graph, *inputs.values()), reference(model, **inputs), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
