"""Exports to ONNX: ONNX Runtime computes the same from the file alone; codes are unpacked by definition; refusals."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, ENCODERS, VOCAB, save
from missing import skip_or_fail
from numpy.typing import NDArray
from packed_models import random_samples
from tiny_images import classifier, resnet
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import UsageError, VerificationError
from compressor.export.exchange.job import export_graph
from compressor.export.foreign.onnx import Onnx
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.graph.sites import EXPERT, linear_sites
from compressor.passes.embedding import Embedding
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export

for name in ("onnx", "onnxruntime"):
    if find_spec(name) is None:
        skip_or_fail(f"{name} is not installed: pip install 'compressor[onnxruntime]'")
onnx = importlib.import_module("onnx")

SAMPLES = random_samples(VOCAB, 16)
Q_PROJ = "model.layers.0.self_attn.q_proj"
HEAD = "lm_head"
EXACT = 1e-5  # of the largest output: sums in another order


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    cls, sizes = DECODERS["Llama, tied"]
    save(folder, cls, {**sizes, "hidden_size": 128, "head_dim": 32, "intermediate_size": 96}, True)
    return folder


@functools.cache
def captured(model: Path) -> GraphModule:
    return capture(model)


@functools.cache
def images() -> GraphModule:
    """Capture a classifier that has no folder."""
    return capture(classifier(resnet()), (torch.randn(2, 3, 32, 32),))


def compressed(graph: GraphModule, *steps: Any) -> GraphModule:
    graph = clone_graph(graph)
    for step in steps:
        graph = step.run(graph, Context(samples=SAMPLES))
    return graph


def rtn(scheme: str, *targets: str) -> Rtn:
    return Rtn(scheme=scheme, targets=targets or "Linear", ignore=() if targets else (HEAD,))


def exported(graph: GraphModule, folder: Path, *options: str) -> tuple[dict[str, Any], Any]:
    """Export with a check in ONNX Runtime; the answer, and the model as the package onnx reads it."""
    export = make_export("onnx", options)
    folder.mkdir()
    content = export_graph(graph, export.plan(graph), folder, folder, check=True).content()
    return content, onnx.load(str(folder / "model.onnx"))


def operators(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def share(content: dict[str, Any]) -> float:
    """Return the difference of outputs as a share of the largest."""
    return float(content["checked"]["difference"] / content["checked"]["largest"])


@pytest.mark.parametrize(
    ("steps", "options", "counts"),
    [
        ([rtn("W4A16_G32"), Embedding()], [], {"MatMulNBits": 15, "GatherBlockQuantized": 1}),
        ([rtn("W2A16_ASYM_G32"), Embedding("W4A16_G64")], ["opset=18", "external=true"], {"MatMulNBits": 15}),
        ([rtn("W3A16_ASYM_G32")], ["operators=standard"], {"DequantizeLinear": 14, "MatMulNBits": 0}),
        ([rtn("FP8_E4M3")], ["opset=19"], {"DequantizeLinear": 14, "MatMulNBits": 0}),
        ([rtn("W8A16"), Embedding()], ["operators=standard"], {"DequantizeLinear": 16, "GatherBlockQuantized": 0}),
    ],
)
def test_a_decoder_says_the_same_with_its_past(
    llama: Path, tmp_path: Path, steps: list[Any], options: list[str], counts: dict[str, int]
) -> None:
    content, model = exported(compressed(captured(llama), *steps), tmp_path / "out", *options)
    checked = content["checked"]
    assert checked["tokens"] == checked["equal_tokens"] == 32 and share(content) <= EXACT
    assert {name: operators(model)[name] for name in counts} == counts
    assert [given.name for given in model.graph.input[:2]] == ["input_ids", "past_key_values.0.key"]
    assert "present.1.value" in [result.name for result in model.graph.output]
    assert (tmp_path / "out/model.onnx.data").is_file() == ("external=true" in options)
    assert (tmp_path / "out/tokenizer.json").is_file() and content["weight_bytes"] < content["folder_bytes"]


@pytest.mark.parametrize(
    ("family", "scheme", "options", "product"),
    [
        ("Qwen 3, experts", "W4A16_G16", [], "MatMulNBits"),
        ("Qwen 3, experts", "W8A16", ["operators=standard"], "DequantizeLinear"),
        ("Granite, shared experts", "W8A8", [], "MatMulInteger"),
    ],
)
def test_experts_multiply_the_rows_of_their_tokens(
    tmp_path: Path, family: str, scheme: str, options: list[str], product: str
) -> None:
    cls, sizes = DECODERS[family]
    save(tmp_path / "model", cls, sizes, True)
    dense = capture(tmp_path / "model")
    experts = sum(site.module_class == EXPERT for site in linear_sites(dense))
    content, model = exported(compressed(dense, rtn(scheme)), tmp_path / "out", *options)
    checked = content["checked"]
    assert checked["tokens"] == checked["equal_tokens"] == 32
    assert share(content) <= (EXACT if "A16" in scheme else 0.02)  # rounding falls the other way here and there
    assert operators(model)[product] >= experts > 0 and operators(model)["NonZero"] == experts // 2


def fields(data: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Read codes one after another, lowest bits first, from rows of bytes."""
    return np.array(
        [[int(byte) >> shift & (2**bits - 1) for byte in row for shift in range(0, 8, bits)] for row in data]
    )


@pytest.mark.parametrize(("scheme", "bits", "block"), [("W4A16_ASYM_G64", 4, 64), ("W5A16_G32", 8, 32)])
def test_blocks_unpack_by_definition(llama: Path, tmp_path: Path, scheme: str, bits: int, block: int) -> None:
    graph = compressed(captured(llama), rtn(scheme, "q_proj"))
    content, model = exported(graph, tmp_path / "out")
    parts = {x.name.removeprefix(f"{Q_PROJ}."): onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    assert {a.name: a.i for a in node.attribute} == {"K": 128, "N": 128, "bits": bits, "block_size": block}
    codes, group = fields(parts["codes"], bits), np.arange(128) // block
    zeros = fields(parts["zeros"], bits)[:, group] if "zeros" in parts else 1 << (bits - 1)
    values = (codes - zeros) * parts["scales"].astype(np.float64)[:, group]
    site = next(site for site in Onnx().sites(graph) if site.module == Q_PROJ)
    assert np.array_equal(values, dequantize(site.packed).numpy())
    size = sum(parts[name].nbytes for name in ("codes", "scales", "zeros") if name in parts)
    assert content["bits_by_tensor"][f"{Q_PROJ}.weight"] == size * 8 / 128**2
    assert any("held in 8 bits" in note for note in content["notes"]) == (bits == 8)


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8_G32"])
def test_rounded_activations_are_the_bundles(llama: Path, tmp_path: Path, scheme: str) -> None:
    """One linear, so that no rounding falls the other way after another."""
    content, model = exported(compressed(captured(llama), rtn(scheme, "re:.*0.self_attn.q_proj")), tmp_path / "out")
    assert share(content) <= EXACT
    assert operators(model)["MatMulInteger"] == (scheme == "W8A8") and operators(model)["Round"] == 1


def test_an_encoder_pads_and_rounds(tmp_path: Path) -> None:
    cls, sizes = ENCODERS["BERT"]
    save(tmp_path / "bert", cls, sizes, False)
    graph = compressed(capture(tmp_path / "bert"), Rtn("W8A16", targets=("Linear",)))
    content, model = exported(graph, tmp_path / "out")
    assert share(content) <= EXACT and operators(model)["MatMulNBits"] > 10
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"), providers=["CPUExecutionProvider"])
    ids, mask = np.arange(12).reshape(2, 6), np.array([[1] * 6, [1, 1, 1, 0, 0, 0]])
    found = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    with torch.no_grad():
        wanted = graph(torch.as_tensor(ids), torch.as_tensor(mask, dtype=torch.float32)).numpy()
    assert np.abs(found - wanted)[mask == 1].max() <= EXACT * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("scheme", "counts"),
    [
        ("W8A8_STATIC", {"Conv": 6, "QuantizeLinear": 7, "DequantizeLinear": 14, "Transpose": 0}),
        ("W8A8", {"Conv": 0, "MatMulInteger": 7}),
        ("W8A16", {"Conv": 6, "DequantizeLinear": 6, "Transpose": 0}),
        ("FP8_E5M2", {"Conv": 6, "DequantizeLinear": 7, "Transpose": 0}),
    ],
)
def test_images_are_classified_by_convolutions(tmp_path: Path, scheme: str, counts: dict[str, int]) -> None:
    graph = clone_graph(images())
    inputs = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    context = Context(samples=Samples(inputs, torch.empty(0, dtype=torch.int64), "0" * 64, "noise"))
    graph = Rtn(scheme, targets=("Conv2d", "Linear")).run(graph, context)
    content, model = exported(graph, tmp_path / "out")
    assert share(content) <= (2e-2 if scheme == "W8A8_STATIC" else EXACT)
    assert {name: operators(model)[name] for name in counts} == counts


@pytest.mark.parametrize(
    ("steps", "options", "words"),
    [
        ([rtn("LUT3_G32")], [], [Q_PROJ, "LUT3_G32", "codebooks", "dense="]),
        ([rtn("FP8_E4M3_G32")], [], [Q_PROJ, "E4M3", "one scale a row"]),
        ([rtn("FP6_E2M3_G32")], [], [Q_PROJ, "E2M3", "integers of 2 to 8 bits"]),
        ([rtn("FP8_E4M3")], ["opset=18"], ["opset 19", "18"]),
        ([rtn("W8A16_G8")], [], [Q_PROJ, "power of two", "8"]),
        ([rtn("W4A16_G32")], ["opset=12"], ["opset", "18 to 23"]),
        ([rtn("W4A16_G32")], ["operators=standard", "opset=19"], ["opset 21", "19"]),
        ([rtn("W4A16_G32")], ["dense=up_proj2"], ["up_proj2", "not a packed site"]),
    ],
)
def test_what_cannot_be_held_is_refused(llama: Path, steps: list[Any], options: list[str], words: list[str]) -> None:
    graph = compressed(captured(llama), *steps)
    with pytest.raises(UsageError) as refused:
        make_export("onnx", tuple(options)).plan(graph)
    assert all(word in str(refused.value) for word in words), refused.value


def test_an_operator_without_a_rule_is_named(llama: Path) -> None:
    graph = clone_graph(captured(llama))
    node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)[0]
    node.target = torch.ops.aten.erfinv.default
    with pytest.raises(UsageError, match=r"mlp.*aten::erfinv: onnx has no rule"):
        make_export("onnx", ()).plan(graph)


def test_a_wrong_number_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.export.onnx_out.codes import Blocks

    scales = Blocks.scales
    monkeypatch.setattr(Blocks, "scales", lambda self: scales(self) * np.float16(1.01))
    with pytest.raises(VerificationError, match="the client computes something else"):
        exported(compressed(captured(llama), rtn("W4A16_G32")), tmp_path / "out")
