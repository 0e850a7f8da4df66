"""An expert model by a recipe: a bundle that computes what transformers does with its weights, tokens counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, LENGTH, VOCAB, save
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from web_bundles import in_node, web_tensors

import compressor
from compressor.codegen.web.session import WebBundle
from compressor.evaluate.comparison import Speed
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe
from compressor.verify.bundle import verify_bundle

FORMAT, SAMPLES, EACH, KEPT = Format.parse("W4A16_G32"), (8, 48), 2, "model.layers.0.mlp.experts.down_proj.1"


def stored_weight(stored: dict[str, Tensor], name: str, shape: tuple[int, ...], expert: int | None = None) -> Tensor:
    names = FORMAT.parts(*shape)
    parts = {part: stored[f"{name}.{part}"] if expert is None else stored[f"{name}.{part}"][expert] for part in names}
    return dequantize(PackedWeight(parts, FORMAT, (shape[0], shape[1])))


def with_stored_weights(model: Any, stored: dict[str, Tensor]) -> Any:
    """Give transformers' model the weights that the bundle's stand for, in float64."""
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for name, module in model.named_modules():
            if f"{name}.codes" in stored and isinstance(module, torch.nn.Linear):
                module.weight.copy_(stored_weight(stored, name, tuple(module.weight.shape)))
        for leaf in ("gate_up_proj", "down_proj"):
            for expert, weight in enumerate(getattr(experts, leaf)):
                name, place = f"model.layers.0.mlp.experts.{leaf}", expert
                if leaf == "down_proj":  # the second is dense, and the others are numbered without it
                    if expert == 1:
                        continue
                    name, place = f"{name}.kind0", expert - (expert > 1)
                weight.copy_(stored_weight(stored, name, tuple(weight.shape), place))
    model.set_experts_implementation("eager")  # the default lacks float64
    return model.double()


def run_on(folder: Path, target: Any, one: str, scheme: str) -> tuple[Any, Any, Path]:
    """Return the model, the outcome and the bundle of a recipe with one pass."""
    cls, options = DECODERS["Qwen 3, experts"]
    model = save(folder / "model", cls, {**options, "num_hidden_layers": 1}, True)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    text = folder / "text.txt"
    numbers = np.random.default_rng(0).integers(3, VOCAB, 3000)
    text.write_text(" ".join(f"w{number}" for number in numbers))
    samples = {"text": str(text), "samples": SAMPLES[0], "sequence_length": SAMPLES[1]}
    recipe = {
        "model": str(folder / "model"),
        "passes": [{one: {"scheme": scheme, "ignore": ["lm_head", KEPT]}}],
        "target": target,
        "tune": "off",
        **(
            {"calibration": samples, "evaluation": {"text": str(text), "tokens": 120, "window": 60}}
            if one == "gptq"
            else {}
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.run.job.measure_speed", lambda *_: Speed({}, {}))
        outcome = run_recipe(Recipe.from_dict(recipe), folder / "bundle")
    return model, outcome, folder / "bundle"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    return run_on(tmp_path_factory.mktemp("experts"), {"x86": {"isa": "avx2"}}, "gptq", FORMAT.name)


def test_the_bundle_computes_what_transformers_does(run: tuple[Any, Any, Path]) -> None:
    model, _, folder = run
    bundle, ids = compressor.load(folder), np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))
    prompt = bundle.session(batch=2).step(ids, np.arange(LENGTH))
    session = bundle.session(batch=2)
    steps = [session.step(ids[:, :5], np.arange(5)), *(session.step(ids[:, [i]]) for i in range(5, LENGTH))]
    oracle = with_stored_weights(model, load_file(folder / "weights.safetensors"))
    expected = oracle(torch.from_numpy(ids)).logits.numpy()
    assert np.linalg.norm(prompt - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.linalg.norm(np.concatenate(steps, axis=1) - prompt) < 1e-5 * np.linalg.norm(prompt)


def test_the_report_counts_tokens_and_the_proof_holds(run: tuple[Any, Any, Path]) -> None:
    _, outcome, _ = run
    assert outcome.metrics["batch_independent"]
    sites = {site["site"]: site for site in outcome.sites}
    tokens = [sites[f"model.layers.0.mlp.experts.gate_up_proj.{expert}"]["tokens"] for expert in range(4)]
    assert sum(tokens) == SAMPLES[0] * SAMPLES[1] * EACH
    for expert, count in enumerate(tokens):
        note = sites[f"model.layers.0.mlp.experts.gate_up_proj.{expert}"]["note"]
        assert ("calibrated on the 768 of all experts" in note) is (count < 256)
    assert sites["model.layers.0.self_attn.q_proj"]["tokens"] is None
    assert "model.layers.0.mlp.gate" not in sites and KEPT not in sites


def test_the_bundle_verifies(run: tuple[Any, Any, Path]) -> None:
    assert {
        check.name: check.passed for check in verify_bundle(run[2]).checks if check.passed is not None
    } == dict.fromkeys(("schema", "files", "bytes", "kernels", "evidence"), True)


def test_browsers_compute_what_transformers_does(
    tmp_path: Path, require_adapter: None, require_tool: Callable[..., Path]
) -> None:
    require_tool("wasm-ld")
    model, outcome, folder = run_on(tmp_path, "webgpu", "rtn", FORMAT.name)
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-5
    manifest = json.loads((folder / "manifest.json").read_text())
    oracle = with_stored_weights(model, web_tensors(folder))
    ids = np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))
    expected = oracle(torch.from_numpy(ids)).logits.numpy()
    for engine in ("webgpu", "wasm"):
        session = WebBundle(folder, engine).session(2, LENGTH)  # type: ignore[arg-type]
        steps = [session.step(ids[:, :5], np.arange(5)), *(session.step(ids[:, [i]]) for i in range(5, LENGTH))]
        error = np.linalg.norm(np.concatenate(steps, axis=1) - expected) / np.linalg.norm(expected)
        assert error < 1e-5, engine
    tensors, read = manifest["weights"]["tensors"], manifest["model"]["weight_bytes_per_token"]
    stacked = sum(tensor["bytes"] for name, tensor in tensors.items() if ".experts." in name)
    rest = sum(
        tensor["bytes"] for name, tensor in tensors.items() if ".experts." not in name and "constant" not in name
    )
    table = tensors["model.embed_tokens.weight"]["bytes"]
    indices = sum(tensor["bytes"] for name, tensor in tensors.items() if name.endswith("_experts"))
    assert read == rest - table + table // VOCAB + (stacked - indices) * EACH // 4
    prompt = ids[0, :5]
    found = in_node(
        folder,
        """
        const ids = [];
        for await (const id of model.generateIds(given, { maxTokens: 6 })) ids.push(id);
        return ids;""",
        prompt.tolist(),
    )
    oracle.generation_config.eos_token_id = None
    tokens = oracle.generate(torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=6)[0, 5:]
    assert found == tokens.tolist()
