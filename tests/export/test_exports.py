"""Exports: layouts are unpacked here by their definition, or loaded by transformers; what cannot be held is refused."""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_clients import TOLERANCE, by_transformers, has_client, written
from families import DECODERS, VOCAB, save
from missing import skip_or_fail
from native_bundles import write_native_bundle
from numpy.typing import NDArray
from packed_models import random_samples
from safetensors.torch import load_file
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import CompressorError, RecipeError, ResourceError, UsageError, VerificationError
from compressor.evaluate.quality import GraphLogits
from compressor.export.conversion.original import open_original
from compressor.export.exchange import check, job
from compressor.export.exchange.bundle_graph import bundle_graph
from compressor.export.exchange.dense_form import list_packed
from compressor.export.exchange.job import export_bundle, export_graph
from compressor.export.facts import model_facts
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.passes.embedding import Embedding
from compressor.passes.kv_cache import KvCache
from compressor.passes.magnitude import Magnitude
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe

pytestmark = pytest.mark.usefixtures("captures_once")

SAMPLES = random_samples(VOCAB, 16)
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    cls, sizes = DECODERS["Llama"]
    save(folder, cls, {**sizes, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128}, True)
    return folder


@functools.cache
def captured(model: Path) -> GraphModule:
    return capture(model)


def compressed(model: Path, *steps: Any) -> GraphModule:
    graph = clone_graph(captured(model))
    for step in steps:
        graph = step.run(graph, Context())
    return graph


def rtn(scheme: str, *targets: str) -> Rtn:
    return Rtn(scheme=scheme, targets=targets or "Linear", ignore=() if targets else ("lm_head",))


@pytest.mark.parametrize(
    ("schemes", "layout"),
    [
        (["W4A16_G32"], "pack-quantized"),
        (["W3A16_ASYM_G32"], "pack-quantized"),
        (["FP8_E4M3"], "float-quantized"),
        (["MXFP4"], "mxfp4-pack-quantized"),
        (["NVFP4"], "nvfp4-pack-quantized"),
        (["W8A8", "W4A16_G32"], "mixed-precision"),
    ],
)
def test_transformers_loads_compressed_tensors(model: Path, tmp_path: Path, schemes: list[str], layout: str) -> None:
    steps = [rtn(schemes[0])]
    if len(schemes) > 1:
        steps = [rtn(schemes[0], "down_proj", "up_proj"), rtn(schemes[1], "q_proj", "k_proj", "v_proj")]
    graph = compressed(model, *steps)
    export = make_export("compressed-tensors", ())
    content = written(graph, export, tmp_path / "out")
    stated = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert stated["format"] == layout and len(stated["config_groups"]) == len(schemes)
    loading = export.loading(list_packed(graph))
    assert (loading.dtype == "bfloat16") == (layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"))
    wanted, found = GraphLogits(graph)(np.arange(12)[None])[0], by_transformers(tmp_path / "out", loading)
    allowed = 2e-3 if loading.dequantize else TOLERANCE  # weights are rounded to float16
    allowed = 5e-2 if loading.dtype == "bfloat16" or "W8A8" in schemes else allowed
    assert float((wanted - found).abs().max()) <= allowed * float(wanted.abs().max())
    assert any("127.5" in note for note in content["notes"]) == ("W8A8" in schemes)


def test_a_dense_folder_computes_the_same(model: Path, tmp_path: Path) -> None:
    graph = compressed(model, rtn("W4A16_G32"), Embedding())
    content = written(graph, make_export("safetensors", ()), tmp_path / "out")
    wanted, found = GraphLogits(graph)(np.arange(12)[None])[0], by_transformers(tmp_path / "out")
    assert float((wanted - found).abs().max()) <= TOLERANCE * float(wanted.abs().max())
    assert content["bits_by_tensor"][f"{Q_PROJ}.weight"] == 32


def fields(words: NDArray[Any], bits: int, count: int) -> NDArray[np.int64]:
    """Read codes one after another, lowest bits first, from rows of int32 words: [n, words] -> [n, count]."""
    rows = [sum((int(word) & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(row)) for row in words]
    return np.array([[row >> (bits * i) & (2**bits - 1) for i in range(count)] for row in rows])


def gptq_by_definition(t: dict[str, NDArray[Any]], bits: int, version: int) -> NDArray[Any]:
    inputs, outputs = len(t["g_idx"]), t["qweight"].shape[1]
    codes = fields(t["qweight"].T, bits, inputs)  # [out, in]
    zeros = (fields(t["qzeros"], bits, outputs) + (version == 1)) % 2**bits  # [groups, out]
    return (codes - zeros.T[:, t["g_idx"]]) * t["scales"].T[:, t["g_idx"]].astype(np.float64)


def awq_by_definition(t: dict[str, NDArray[Any]], size: int) -> NDArray[Any]:
    def unpacked(words: NDArray[Any]) -> NDArray[Any]:
        nibbles = fields(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
        ordered = np.empty_like(nibbles)
        ordered[..., [0, 2, 4, 6, 1, 3, 5, 7]] = nibbles
        return ordered.reshape(len(words), -1)

    codes, group = unpacked(t["qweight"]), np.arange(len(t["qweight"])) // size
    return ((codes - unpacked(t["qzeros"])[group]) * t["scales"][group].astype(np.float64)).T


def packed_by_definition(t: dict[str, NDArray[Any]], bits: int) -> NDArray[Any]:
    out, inputs = t["weight_shape"]
    codes, groups = fields(t["weight_packed"], bits, inputs), t["weight_scale"].shape[1]
    group = np.arange(inputs) // (inputs // groups)
    zeros = (
        fields(t["weight_zero_point"].T, bits, out).T
        if "weight_zero_point" in t
        else np.full((out, groups), 2 ** (bits - 1))
    )
    return (codes - zeros[:, group]) * t["weight_scale"][:, group].astype(np.float64)


@pytest.mark.parametrize(
    ("name", "options", "scheme", "unpack"),
    [
        ("gptq", [], "W4A16_G32", lambda t: gptq_by_definition(t, 4, 1)),
        ("gptq", ["version=2"], "W3A16_ASYM_G64", lambda t: gptq_by_definition(t, 3, 2)),
        ("awq", [], "W4A16_ASYM_G64", lambda t: awq_by_definition(t, 64)),
        ("compressed-tensors", [], "W5A16_ASYM_G64", lambda t: packed_by_definition(t, 5)),
    ],
)
def test_words_unpack_by_definition(
    model: Path, tmp_path: Path, name: str, options: list[str], scheme: str, unpack: Callable[[Any], NDArray[Any]]
) -> None:
    graph = compressed(model, rtn(scheme))
    content = written(graph, make_export(name, tuple(options)), tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    parts = {key.removeprefix(f"{Q_PROJ}."): value.numpy() for key, value in tensors.items() if key.startswith(Q_PROJ)}
    packed = next(site.packed for site in list_packed(graph) if site.module == Q_PROJ)
    assert np.array_equal(unpack(parts), dequantize(packed).numpy())
    stored = sum(part.nbytes for part in parts.values())
    assert content["bits_by_tensor"][f"{Q_PROJ}.weight"] == stored * 8 / (128 * 128)


@pytest.mark.parametrize(
    ("name", "options", "steps", "words"),
    [
        ("compressed-tensors", [], [rtn("LUT3_G32")], [Q_PROJ, "LUT3_G32", "codebooks", "dense="]),
        ("compressed-tensors", [], [rtn("W4A16_G32"), Embedding()], ["model.embed_tokens", "W8A16", "table"]),
        ("compressed-tensors", ["dense=up_proj2"], [rtn("W4A16_G32")], ["up_proj2", "not a packed site"]),
        ("compressed-tensors", [], [rtn("BIP2A8_G32")], [Q_PROJ, "BIP2A8_G32", "bit planes"]),
        (
            "compressed-tensors",
            [],
            [rtn("W4A16_G32"), KvCache("FP8_E4M3")],
            ["FP8_E4M3", "each token", "kv_cache_scheme"],
        ),
        ("onnx", [], [KvCache("INT8")], ["INT8", "kv_cache out of the recipe"]),
        ("gptq", [], [rtn("W4A8_G32")], [Q_PROJ, "activations"]),
        ("gptq", [], [rtn("W8A16", "q_proj"), rtn("W4A16_G32", "k_proj")], ["every linear", "v_proj"]),
        ("awq", [], [rtn("W8A16", "q_proj"), rtn("W4A16_G32", "k_proj")], [Q_PROJ, "4 bits"]),
        ("awq", [], [rtn("W4A16_G64", "q_proj"), rtn("W4A16_G32", "k_proj")], ["one format", "W4A16_G64"]),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    model: Path, tmp_path: Path, name: str, options: list[str], steps: list[Any], words: list[str]
) -> None:
    graph = compressed(model, *steps)
    with pytest.raises(UsageError) as refused:
        make_export(name, tuple(options)).plan(graph)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gguff", [], "no export is called"),
        ("gptq", ["version=3"], "version"),
        ("gptq", ["versoin=2"], "versoin"),
        ("gptq", ["output=x"], "-o"),
        ("gptq", ["version"], "KEY=VALUE"),
    ],
)
def test_a_wrong_option_is_an_error_in_words(name: str, options: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make_export(name, tuple(options))


@pytest.mark.parametrize("scheme", ["W8A16_B1x1@50", "W8A16_2:4"])
def test_zeros_are_codes_and_a_site_is_dense_by_request(model: Path, tmp_path: Path, scheme: str) -> None:
    graph = Magnitude(scheme, ignore=("lm_head",)).run(clone_graph(captured(model)), Context(samples=SAMPLES))
    content = written(graph, make_export("compressed-tensors", ("dense=down_proj",)), tmp_path / "out")
    assert content["bits_by_tensor"]["model.layers.1.mlp.down_proj.weight"] == 32
    assert content["bits_by_tensor"][f"{Q_PROJ}.weight"] < 9 and any("zero" in note for note in content["notes"])
    stated = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.down_proj" in stated["ignore"]
    weight = load_file(tmp_path / "out/model.safetensors")[f"{Q_PROJ}.weight_packed"].view(torch.uint8)
    assert float((weight == 128).float().mean()) >= 0.45


@pytest.fixture
def bundle(model: Path, tmp_path: Path) -> Path:
    """Write a bundle with packed weights, and kernels that are none."""
    graph = compressed(model, rtn("W4A16_G32"), Embedding())
    (library := tmp_path / "kernels.so").write_bytes(b"not a library")
    sites = [{"site": s.module, "format": s.packed.format.name} for s in list_packed(graph)]
    parts = {"graph": graph, "parameters": [name for name, _ in graph.named_parameters()], "library": library,
             "vectors": {}, "kernels": [], "cpu_features": [], "model": model_facts(graph), "sites": sites,
             "recipe": {"model": str(model)}, "dense_weight_bytes": 1, "tokenizer": model}  # fmt: skip
    return write_native_bundle(tmp_path / "bundle", parts)


def test_a_bundle_is_its_models_graph(model: Path, bundle: Path, tmp_path: Path) -> None:
    graph, made = bundle_graph(bundle), compressed(model, rtn("W4A16_G32"), Embedding())
    ids = np.arange(12)[None]
    assert torch.equal(GraphLogits(graph)(ids), GraphLogits(made)(ids))
    original = open_original(bundle)
    packed = {site.parameter: site.packed for site in list_packed(made)}
    assert original.packed.keys() == packed.keys() and not list_packed(original.graph)
    assert all(torch.equal(original.graph.get_parameter(name), dequantize(one)) for name, one in packed.items())
    export = make_export("compressed-tensors", ("dense=embed_tokens",))
    content = export_bundle(bundle, export, tmp_path / "out", check=False).content()
    assert content["not_checked"] == "not checked: --no-check" and (tmp_path / "out/model.safetensors").is_file()
    with pytest.raises(UsageError, match="holds something else"):
        export_bundle(bundle, export, bundle / "lib", check=False)


def test_a_bundle_of_other_weights_is_refused(bundle: Path, tmp_path: Path) -> None:
    cls, sizes = DECODERS["Llama"]
    save(tmp_path / "other", cls, {**sizes, "hidden_size": 128, "head_dim": 32, "intermediate_size": 64}, True)
    with pytest.raises(UsageError, match="another model"):
        bundle_graph(bundle, str(tmp_path / "other"))
    with pytest.raises(UsageError, match="--model FOLDER"):
        bundle_graph(bundle, str(tmp_path / "nowhere" / "at" / "all"))
    (bundle / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(Exception, match=r"weights\.safetensors"):
        bundle_graph(bundle)


def test_nothing_is_left_of_an_export_that_fails(
    model: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, before = make_export("safetensors", ()), sorted(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compressor.export.checkpoints.stored.write_safetensors", full)
    with pytest.raises(ResourceError, match="No space left"):
        export_bundle(bundle, export, tmp_path / "out", check=False)
    monkeypatch.undo()

    def wrong(*_: object, **__: object) -> None:
        raise VerificationError("the client computes something else")

    monkeypatch.setattr(job, "check_export", wrong)
    monkeypatch.setattr(job, "why_unchecked", lambda *_: "")
    with pytest.raises(VerificationError, match="something else"):
        export_bundle(bundle, export, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_client_that_is_missing_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    graph, export = compressed(model, rtn("W4A16_G32")), make_export("gptq", ())
    form = export.plan(graph)
    (tmp_path / "out").mkdir()
    content = export_graph(graph, form, tmp_path / "out", tmp_path / "out").content()
    assert content["not_checked"] == "not checked: pip install optimum gptqmodel" and content["checked"] is None
    (tmp_path / "again").mkdir()
    with pytest.raises(CompressorError, match="pip install optimum gptqmodel"):
        export_graph(graph, form, tmp_path / "again", tmp_path / "again", check=True)


def test_a_recipe_exports_beside_its_bundle(model: Path, tmp_path: Path) -> None:
    has_client()
    if find_spec("onnxruntime") is None:
        skip_or_fail("onnxruntime is not installed")
    data = {"model": str(model), "passes": [{"rtn": {"scheme": "W4A16_G32", "ignore": ["lm_head"]}}], "target": "null"}
    exports = [{"to": "compressed-tensors", "check": True}, {"to": "gptq", "version": 2, "check": False}]
    exports += [{"to": "onnx", "check": True}]
    recipe = Recipe.from_dict({**data, "tune": "off", "exports": exports})
    assert "exports" not in recipe.resolved()
    outcome = run_recipe(recipe, tmp_path / "b")
    first, second, third = outcome.exports
    for checked in (first["checked"], third["checked"]):
        assert checked["equal_tokens"] == checked["tokens"] == 32
        assert checked["difference"] <= 1e-4 * checked["largest"]
    assert second["export"] == str(tmp_path / "b-gptq") and (tmp_path / "b-gptq/config.json").is_file()
    assert sorted(place.name for place in tmp_path.iterdir()) == ["b", "b-compressed-tensors", "b-gptq", "b-onnx"]


@pytest.mark.parametrize(
    ("exports", "words"),
    [
        ("gptq", "exports: expected a list"),
        ([{"output": "x"}], r"exports\.0: expected `to: NAME`"),
        (["onnxx"], r"exports\.0: no export is called 'onnxx'"),
        (["gptq", {"to": "gptq"}], "exports: two exports go to gptq"),
        ([{"to": "gptq", "check": "yes"}], r"exports\.0\.check: 'yes'"),
        ([{"to": "gptq", "version": 7}], r"exports\.0\.version: 7"),
    ],
)
def test_a_wrong_export_in_a_recipe_is_located(exports: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.from_dict({"passes": [], "exports": exports})


def test_a_recipe_is_refused_before_the_first_pass(model: Path, tmp_path: Path) -> None:
    data = {"model": str(model), "passes": [{"rtn": {"scheme": "LUT3_G32", "ignore": ["lm_head"]}}], "target": "null"}
    recipe = Recipe.from_dict({**data, "tune": "off", "exports": ["gptq"]})
    with pytest.raises(RecipeError, match=r"exports\.0: .*q_proj: LUT3_G32: gptq has no such layout"):
        run_recipe(recipe, tmp_path / "b")
    assert not list(tmp_path.iterdir())
