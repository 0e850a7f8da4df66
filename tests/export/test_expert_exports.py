"""Exports of mixtures of experts: each projection of each expert as the model's folder has it, loaded by clients."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from export_clients import TOLERANCE, by_transformers, saved, written
from missing import skip_or_fail
from safetensors.torch import load_file

from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.export.exchange.dense_form import list_packed
from compressor.export.exchange.job import export_graph
from compressor.formats.packing import dequantize
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export


@pytest.mark.parametrize(
    ("family", "name", "scheme"),
    [
        ("Mixtral", "safetensors", "LUT3_G32"),
        ("Qwen 3, experts", "compressed-tensors", "W4A16_G32"),
        ("Mixtral", "compressed-tensors", "W3A16_G32"),
        ("Mixtral", "compressed-tensors", "FP8_E4M3"),
    ],
)
def test_experts_are_written_as_they_lie_in_the_folder(tmp_path: Path, family: str, name: str, scheme: str) -> None:
    """One tensor for each projection of each expert, though the graph has two of them in one weight."""
    graph = saved(tmp_path / "model", family)
    graph = Rtn(scheme, targets=("Expert", "Linear"), ignore=("lm_head",)).run(graph, Context())
    export = make_export(name, ())
    content = written(graph, export, tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    if name == "safetensors":
        assert before.keys() == after.keys()
    else:
        experts = [one for one in before if re.search(r"experts\.\d", one)]
        assert len(experts) >= 3 * 4 and all(f"{one}_scale" in after for one in experts)
        assert all(content["bits_by_tensor"][one] < 13 for one in experts)
        stated = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
        assert any(one.endswith(".gate") for one in stated["ignore"]) and "lm_head" in stated["ignore"]
    loading = export.loading(list_packed(graph))
    wanted, found = GraphLogits(graph)(np.arange(12)[None])[0], by_transformers(tmp_path / "out", loading)
    allowed = 5e-2 if scheme == "FP8_E4M3" else 2e-3 if loading.dequantize else TOLERANCE
    assert float((wanted - found).abs().max()) <= allowed * float(wanted.abs().max())


def test_experts_have_a_scheme_beside_that_of_other_linears(tmp_path: Path) -> None:
    graph = Rtn("W4A16_G32", targets="Expert").run(saved(tmp_path / "model", "Mixtral"), Context())
    graph = Rtn("W8A16", targets="Linear", ignore=("lm_head",)).run(graph, Context())
    export = make_export("compressed-tensors", ())
    written(graph, export, tmp_path / "out")
    wanted = GraphLogits(graph)(np.arange(12)[None])[0]
    found = by_transformers(tmp_path / "out", export.loading(list_packed(graph)))
    assert float((wanted - found).abs().max()) <= 2e-3 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("family", "name", "steps", "words"),
    [
        (
            "Granite, experts",
            "safetensors",
            ["W8A16"],
            r"experts\S+: .* it is a part of \S+, which is stored as a whole",
        ),
        ("Mixtral", "gptq", ["W8A16"], r"experts\.0\.\S+: .* class Linear, and this one's is Expert"),
        ("Mixtral", "compressed-tensors", ["W4A16_ASYM_G32"], r"experts\.0\.\S+: .* reads experts as packed symmetric"),
        (
            "Mixtral",
            "compressed-tensors",
            ["W4A16_G32", "W8A16"],
            "has one scheme for all experts, and theirs are W4A16",
        ),
    ],
)
def test_experts_that_cannot_be_held_are_refused(
    tmp_path: Path, family: str, name: str, steps: list[str], words: str
) -> None:
    graph = saved(tmp_path, family)
    for scheme, layer in zip(steps, ("0" if len(steps) > 1 else "", "1"), strict=False):
        graph = Rtn(scheme, targets=rf"re:.*layers\.{layer}.*experts.*").run(graph, Context())
    with pytest.raises(UsageError, match=words):
        make_export(name, ()).plan(graph)


def test_experts_of_a_layer_are_one_tensor_of_a_gguf_file(tmp_path: Path) -> None:
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        skip_or_fail("gguf or accelerate is not installed")
    import gguf

    graph = saved(tmp_path / "model", "Qwen 3, experts", norm_topk_prob=True, hidden_size=64)
    graph = Rtn("W4A16_G32", targets=("Expert", "Linear"), ignore=("lm_head",)).run(graph, Context())
    (folder := tmp_path / "out").mkdir()
    export = make_export("gguf", ("pre=none",))
    content = export_graph(graph, export.plan(graph), folder, folder, check=True).content()
    assert content["checked"]["equal_tokens"] == content["checked"]["tokens"] > 8
    assert content["checked"]["difference"] <= 1e-4 * content["checked"]["largest"]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    (held,) = [site for site in list_packed(graph) if site.module.endswith("layers.1.mlp.experts.gate_up_proj.2")]
    for name, rows in zip(("gate", "up"), dequantize(held.packed).chunk(2), strict=True):
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type.name == "Q4_0"
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type)[2], rows.numpy())


def test_what_a_gguf_file_of_experts_cannot_say_is_refused(tmp_path: Path) -> None:
    """Weights of a token's experts that are not divided by their sum; experts of one layer in several types."""
    graph = saved(tmp_path / "one", "Qwen 3, experts", norm_topk_prob=False)
    graph = Rtn("W4A16_G32", targets="Expert").run(graph, Context())
    with pytest.raises(UsageError, match="norm_topk_prob is False, which a GGUF file cannot say"):
        make_export("gguf", ("pre=none",)).plan(graph)
    graph = saved(tmp_path / "two", "Qwen 3, experts", norm_topk_prob=True)
    graph = Rtn("W4A16_G32", targets=r"re:.*_proj\.[01]").run(graph, Context())
    graph = Rtn("W8A16_G32", targets=r"re:.*_proj\.[23]").run(graph, Context())
    with pytest.raises(UsageError, match="one type for all experts of a layer, and theirs are W4A16_G32 and W8A16"):
        make_export("gguf", ("pre=none",)).plan(graph)
