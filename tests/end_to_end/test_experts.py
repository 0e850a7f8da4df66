"""An expert model by a recipe: GPTQ, a bundle that computes what transformers does with its weights, tokens counted."""

from __future__ import annotations

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

import compressor
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("experts")
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
        "calibration": samples,
        "evaluation": {"text": str(text), "tokens": 120, "window": 60},
        "passes": [{"gptq": {"scheme": FORMAT.name, "ignore": ["lm_head", KEPT]}}],
        "target": "x86",
        "tune": "off",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.run.job.measure_speed", lambda *_: Speed({}, {}))
        outcome = run_recipe(Recipe.from_dict(recipe), folder / "bundle")
    return model, outcome, folder / "bundle"


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
