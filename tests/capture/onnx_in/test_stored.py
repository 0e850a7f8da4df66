"""Weights stay in their files: mapped where they are aligned, and what is read is what onnx reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx_models import convnet, make_model, node, write

from compressor.capture.capture import capture
from compressor.capture.onnx_in.model import read_model
from compressor.capture.onnx_in.stored import read_tensor, strip_weights
from compressor.errors import ModelFileError


def mapped(file: Path, tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in a mapping of a file, by this process's memory map."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *rest = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return rest[-1] == str(file)
    return False


@pytest.mark.parametrize("external", [True, False])
def test_weights_are_the_file_s(external: bool, tmp_path: Path) -> None:
    model = convnet()
    options: dict[str, Any] = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    file = write(model, tmp_path, **(options if external else {}))
    read = read_model(file)
    held = {proto.name: read.tensor(proto) for proto in read.graph.initializer}
    for proto in onnx.load(file).graph.initializer:
        assert np.array_equal(held[proto.name].numpy(), numpy_helper.to_array(proto))
    large = held["onnx::MatMul_7"]
    assert external == mapped(tmp_path / "w.bin", large)
    place = read.places["onnx::MatMul_7"]
    assert mapped(place.file, large) == (place.offset % 4 == 0)
    assert len(read.graph.SerializeToString()) < large.nbytes


def test_the_captured_graph_s_weights_are_the_file_s(tmp_path: Path) -> None:
    file = write(convnet(), tmp_path, save_as_external_data=True, location="w.bin", size_threshold=0)
    graph = capture(file)
    for name in ("hidden.weight", "head.weight"):
        assert mapped(tmp_path / "w.bin", graph.get_parameter(name))


TYPES = [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.INT8,
         TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.INT64,
         TensorProto.BOOL, TensorProto.UINT4, TensorProto.INT4, TensorProto.FLOAT8E4M3FN]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "raw"), [(kind, raw) for kind in TYPES for raw in (True, False) if raw or kind != TensorProto.FLOAT8E4M3FN]
)
def test_every_type_is_read_as_onnx_reads_it(kind: int, raw: bool) -> None:
    values = np.array([[1.0, 0.0, 3.0], [2.0, 5.0, 7.0]]).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    proto = numpy_helper.from_array(values, "w")
    if not raw:
        proto = onnx.helper.make_tensor("w", kind, [2, 3], values.astype(np.float64).reshape(-1).tolist())
    tensor = read_tensor(proto, None)
    assert tensor.double().numpy().tolist() == values.astype(np.float64).tolist()


def test_too_few_bytes_are_refused() -> None:
    proto = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    proto.dims[0] = 3
    with pytest.raises(ModelFileError, match="'w' has 24 bytes, and its shape"):
        read_tensor(proto, None)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(make_model([node("Relu", ["x"], ["y"])], {"x": [2]}, ["y"]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = folder / "model.onnx"
    file.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        read_model(file)
    except ModelFileError as error:
        assert str(error).startswith(str(file))


def test_a_message_without_weights_is_left_as_it_is(tmp_path: Path) -> None:
    model = make_model([node("Relu", ["x"], ["y"])], {"x": [2]}, ["y"])
    file = write(model, tmp_path)
    message, places = strip_weights(file)
    assert onnx.ModelProto.FromString(message) == model and not places
