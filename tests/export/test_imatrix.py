"""Importance matrices: the package gguf reads the sums that PyTorch's own modules see; what has none is refused."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, save
from missing import skip_or_fail
from native_bundles import write_native_bundle
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM

from compressor.capture.capture import capture
from compressor.data.text import load_samples
from compressor.errors import CompressorError, UsageError
from compressor.export.conversion.job import convert
from compressor.export.exchange.dense_form import list_packed
from compressor.export.exchange.job import export_bundle, export_graph
from compressor.export.facts import model_facts
from compressor.graph.model import clone_graph
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export
from compressor.recipe.recipe import Recipe

PARTS = {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
CALIBRATION = {"text": "python_docs_heldout.txt", "samples": 3, "sequence_length": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    cls, sizes = DECODERS["Llama, tied"]
    save(folder, cls, {**sizes, "vocab_size": 2048}, True)
    reference = Path(__file__).parents[2] / "models/reference/tokenizer.json"
    (folder / "tokenizer.json").write_bytes(reference.read_bytes())
    return folder


@functools.cache
def captured(folder: Path) -> GraphModule:
    return capture(folder)


def bundled(graph: GraphModule, model: Path, folder: Path) -> Path:
    """Write a bundle whose recipe has the calibration, and kernels that are none."""
    (library := folder / "kernels.so").write_bytes(b"not a library")
    sites = [{"site": s.module, "format": s.packed.format.name} for s in list_packed(graph)]
    parts = {"graph": graph, "parameters": [name for name, _ in graph.named_parameters()], "library": library,
             "vectors": {}, "kernels": [], "cpu_features": [], "model": model_facts(graph), "sites": sites,
             "recipe": {"model": str(model), "calibration": CALIBRATION}, "dense_weight_bytes": 1,
             "tokenizer": model}  # fmt: skip
    return write_native_bundle(folder / "bundle", parts)


def recipe(**more: Any) -> Recipe:
    return Recipe.from_dict({"passes": [], **more})


def test_sums_are_those_of_the_modules_inputs_and_of_the_dense_model(model: Path, tmp_path: Path) -> None:
    if find_spec("gguf") is None:
        skip_or_fail("gguf is not installed")
    import gguf

    given = recipe(calibration=CALIBRATION)
    graph = Rtn("W2A16_C", ignore=("lm_head",)).run(clone_graph(captured(model)), Context())
    form = make_export("imatrix", ()).plan_for(graph, given)
    content = export_graph(graph, form, tmp_path, tmp_path).content()
    assert content["not_checked"].startswith("not checked: statistics") and content["checked"] is None
    with pytest.raises(CompressorError, match="llama-quantize"):
        export_graph(graph, form, tmp_path, tmp_path, check=True)
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    stated = {name: field.contents() for name, field in reader.fields.items()}
    assert stated["general.type"] == "imatrix" and stated["imatrix.datasets"] == ["python_docs_heldout.txt"]
    assert (stated["imatrix.chunk_count"], stated["imatrix.chunk_size"]) == (3, 16)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    ids = load_samples(given.calibration, model).ids
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(theirs.model.layers):
        for name, module in PARTS.items():
            place = f"blk.{layer}.{name}.weight"
            block.get_submodule(module).register_forward_pre_hook(
                lambda _, args, place=place: seen.update({place: args[0].double().square().sum((0, 1))})
            )
    with torch.no_grad():
        theirs(ids)
    assert len(tensors) == 2 * 7 * len(theirs.model.layers)
    bundle = bundled(graph, model, tmp_path)
    export_bundle(bundle, make_export("imatrix", ()), tmp_path / "again")
    assert (tmp_path / "again/imatrix.gguf").read_bytes() == (tmp_path / "imatrix.gguf").read_bytes()
    for place, sums in seen.items():
        assert tensors[f"{place}.counts"].tolist() == [48]
        np.testing.assert_allclose(tensors[f"{place}.in_sum2"], sums, rtol=1e-4)


def test_experts_have_the_sums_of_their_tokens(tmp_path: Path) -> None:
    if find_spec("gguf") is None:
        skip_or_fail("gguf is not installed")
    import gguf

    cls, sizes = DECODERS["Qwen 3, experts"]
    save(folder := tmp_path / "model", cls, {**sizes, "norm_topk_prob": True, "vocab_size": 2048}, True)
    reference = Path(__file__).parents[2] / "models/reference/tokenizer.json"
    (folder / "tokenizer.json").write_bytes(reference.read_bytes())
    form = make_export("imatrix", ()).plan_for(graph := capture(folder), given := recipe(calibration=CALIBRATION))
    export_graph(graph, form, tmp_path, tmp_path)
    tensors = {one.name: np.array(one.data) for one in gguf.GGUFReader(tmp_path / "imatrix.gguf").tensors}
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in theirs.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with torch.no_grad():
        theirs(load_samples(given.calibration, folder).ids)
    for layer, (rows, index) in enumerate(seen):
        chosen = [(index == expert).any(-1) for expert in range(int(index.max()) + 1)]
        wanted = [rows[each].double().square().sum(0) for each in chosen]
        for name in ("gate", "up"):
            found = tensors[f"blk.{layer}.ffn_{name}_exps.weight.in_sum2"]
            np.testing.assert_allclose(found, torch.stack(wanted), rtol=1e-4)
            counts = tensors[f"blk.{layer}.ffn_{name}_exps.weight.counts"]
            assert counts.tolist() == [[int(each.sum())] for each in chosen]
        assert tensors[f"blk.{layer}.ffn_down_exps.weight.in_sum2"].shape == (4, 32)


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ((), {}, "--set text=python_docs"),
        (("text=python_docs_heldout",), {}, "held out"),
        (("samples=-1",), {"calibration": CALIBRATION}, "samples: -1"),
        (("sequence_length=999999",), {"calibration": CALIBRATION}, "positions; lower it"),
        (("dense=q_proj",), {"calibration": CALIBRATION}, "no weights"),
    ],
)
def test_a_wrong_request_is_refused_in_words(
    model: Path, options: tuple[str, ...], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_export("imatrix", options).plan_for(captured(model), recipe(**given))


def test_it_is_asked_for_beside_a_bundle_only(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not hold weights"):
        convert(model, tmp_path / "out", make_export("imatrix", ()))
    with pytest.raises(UsageError, match="statistics of a model on a text"):
        make_export("imatrix", ()).plan(captured(model))
    assert not (tmp_path / "out").exists()


def test_a_model_without_names_there_is_refused(tmp_path: Path) -> None:
    cls, sizes = DECODERS["Phi 3"]
    save(tmp_path, cls, sizes, True)
    with pytest.raises(UsageError, match="LlamaForCausalLM, Qwen2ForCausalLM"):
        make_export("imatrix", ()).plan_for(capture(tmp_path, weights=False), recipe(calibration=CALIBRATION))
