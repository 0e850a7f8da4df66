"""Files that are refused, by the node's name, before any weight is read; and those that mean harm."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper
from onnx_models import convnet, make_model, node, write

from compressor.capture.capture import capture
from compressor.capture.onnx_in.model import read_model
from compressor.cli.commands import main
from compressor.errors import CaptureError, UsageError


def relu(opset: int = 17, **options: object) -> ModelProto:
    return make_model([node("Relu", ["x"], ["y"], name="act")], {"x": [2, 3]}, ["y"], opset=opset, **options)


def with_external(folder: Path) -> Path:
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    return write(convnet(), folder, **options)


def missing(folder: Path) -> Path:
    file = with_external(folder)
    (folder / "weights.bin").unlink()
    return file


def short(folder: Path) -> Path:
    file = with_external(folder)
    os.truncate(folder / "weights.bin", 100)
    return file


def elsewhere(location: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        inner = folder / "inner"
        inner.mkdir()
        file = with_external(inner)
        (inner / "weights.bin").rename(folder / "weights.bin")
        model = onnx.load(file, load_external_data=False)
        for proto in model.graph.initializer:
            for entry in proto.external_data:
                if entry.key == "location":
                    entry.value = location.format(folder=folder)
        if location == "link.bin":
            (inner / "link.bin").symlink_to(folder / "weights.bin")
        file.write_bytes(model.SerializeToString())
        return file

    return make


def text(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folder / "model.onnx"
        file.write_bytes(content)
        return file

    return make


def written(model: Callable[[], ModelProto]) -> Callable[[Path], Path]:
    return lambda folder: write(model(), folder)


def loop() -> ModelProto:
    body = helper.make_graph(
        [node("Identity", ["c"], ["c2"]), node("Relu", ["v"], ["v2"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
         helper.make_tensor_value_info("v2", TensorProto.FLOAT, [2, 3])],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "c", "x"], ["y"], name="decode_loop", body=body)]
    return make_model(nodes, {"x": [2, 3]}, ["y"], {"n": np.array(3), "c": np.array(True)}, checked=False)


def custom() -> ModelProto:
    model = relu(checked=False)
    model.graph.node[0].op_type, model.graph.node[0].domain = "FusedGelu", "my.company"
    model.opset_import.append(helper.make_opsetid("my.company", 1))
    return model


def attribute() -> ModelProto:
    model = relu(checked=False)
    model.graph.node[0].attribute.append(helper.make_attribute("leak", 0.5))
    return model


def dangling() -> ModelProto:
    model = relu(checked=False)
    model.graph.node[0].input[0] = "z"
    return model


def strings() -> ModelProto:
    model = relu(checked=False)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    return model


BAD = {
    "missing data": (missing, "external data of 'conv.weight': .*weights.bin is missing"),
    "short data": (short, "bytes 0 to 864 of .*which has 100"),
    "data above": (elsewhere("../weights.bin"), "not below the model's folder"),
    "absolute data": (elsewhere("{folder}/weights.bin"), "not below the model's folder"),
    "linked data": (elsewhere("link.bin"), "a link out of the model's folder"),
    "text": (text(b"#!/bin/sh\necho this is a model\n"), "not an ONNX file"),
    "empty": (text(b""), "it is empty"),
    "zeros": (text(bytes(100)), "not an ONNX file"),
    "loop": (written(loop), "Loop 'decode_loop': control flow"),
    "custom": (written(custom), "FusedGelu 'act': it is of the domain 'my.company'"),
    "old": (written(lambda: relu(12)), "opset 12 is too old: 13 to 23"),
    "new": (written(lambda: relu(24)), "opset 24 is too new: 13 to 23"),
    "attribute": (written(attribute), "Relu 'act': opset 17 gives it no attribute 'leak'"),
    "dangling": (written(dangling), "Relu 'act' reads 'z', which no node in front of it makes"),
    "strings": (written(strings), "its input 'x' holds string"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_error(name: str, tmp_path: Path) -> None:
    make, why = BAD[name]
    file = make(tmp_path)
    with pytest.raises(CaptureError, match=why) as caught:
        capture(file)
    assert isinstance(caught.value, UsageError) and str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing data", "text", "loop", "custom", "old", "new"])
def test_the_command_ends_with_2_and_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, why = BAD[name]
    file = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {file.name}\npasses: [{{rtn: {{scheme: W8A16}}}}]\ntarget: x86\n", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(main, ["run", str(recipe), "-o", "bundle"], prog_name="compress")
    assert result.exit_code == 2, result.output
    assert why.split(":")[0].split(".*")[0] in result.output.replace("\n", " ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        capture(tmp_path / "absent.onnx")


def test_links_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    file = with_external(blobs)
    file.rename(blobs / "abc")
    (snapshot / "model.onnx").symlink_to(blobs / "abc")
    (snapshot / "weights.bin").symlink_to(blobs / "weights.bin")
    assert len(read_model(snapshot / "model.onnx").files) == 2


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(relu(), tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"compressor\[onnx\]"):
        capture(file)
