"""Encoder-decoders through recipes: their bundles generate what transformers does with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from encoder_decoders import TEXT, VOCAB, expected_tokens, relative, save, take_stored_weights
from web_bundles import in_node

import compressor
import compressor.run.job
from compressor.cli.commands import main
from compressor.codegen.web.session import WebBundle
from compressor.evaluate.comparison import Speed
from compressor.runtime import RequestError

LENGTH = 9


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the comparison of speeds, which waits for gates on them."""
    monkeypatch.setattr(compressor.run.job, "measure_speed", lambda *_, **__: Speed({}, {}))


def command(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def write_text(file: Path) -> Path:
    rng = np.random.default_rng(0)
    file.write_text("\n".join(" ".join(f"w{i}" for i in rng.integers(3, VOCAB, 20)) for _ in range(60)))
    return file


def recipe_of(folder: Path, passes: list[Any], **more: Any) -> Path:
    write_text(folder / "text.txt")
    content = {
        "model": "model",
        "calibration": {"text": "text.txt", "samples": 8, "sequence_length": 32},
        "evaluation": {"tokens": 128, "window": 64, "stride": 32},
        "passes": passes,
        "tune": "off",
        "target": {"x86": {"isa": "avx2"}},  # the quickest to generate
        "gates": {"kl_divergence": "<= 1", "batch_independent": True},
        **more,
    }
    content = {key: value for key, value in content.items() if value}
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(content))
    return file


def saved_bart(folder: Path) -> Any:
    """Save a model that generates several tokens, and return it."""
    cls, options = TEXT["BART"]
    # Else a random model repeats the token that it is given.
    model = save(folder / "model", cls, {**options, "tie_word_embeddings": False, "scale_embedding": True})
    model.generation_config.update(suppress_tokens=[2], forced_eos_token_id=None)  # else it ends at once
    model.generation_config.save_pretrained(folder / "model")
    return model


def test_a_recipe_makes_a_bundle_that_generates(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    passes = [{"gptq": {"scheme": "W4A16_G32", "targets": "re:.*", "ignore": ["lm_head"]}}]
    model = saved_bart(tmp_path)
    done = command("run", recipe_of(tmp_path, passes), "-o", tmp_path / "bundle", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"kl_divergence", "perplexity", "top1_agreement", "batch_independent"} <= set(result)
    bundle = compressor.load(tmp_path / "bundle")
    take_stored_weights(model, tmp_path / "bundle")

    rng = np.random.default_rng(2)
    source, ids, mask = rng.integers(3, VOCAB, (2, 7)), rng.integers(3, VOCAB, (2, LENGTH)), np.ones((2, 7))
    mask[1, 4:] = 0
    prompt = bundle.session(2, 4, source, mask).step(ids, np.arange(LENGTH))
    exact = model.double()(*(torch.from_numpy(x) for x in (source, mask)), decoder_input_ids=torch.from_numpy(ids))
    assert relative(prompt, exact.logits) < 1e-4
    session = bundle.session(2, 4, source, mask)
    steps = [session.step(ids[:, :3], np.arange(3)), *(session.step(ids[:, [i]]) for i in range(3, LENGTH))]
    assert relative(np.concatenate(steps, 1), prompt) < 1e-5

    tokens = expected_tokens(model, torch.from_numpy(source[:1]), 12)
    assert list(bundle.generate_ids(source[0], max_tokens=12)) == tokens and len(set(tokens)) > 1
    words = " ".join(f"w{i}" for i in source[0])
    said = command("generate", tmp_path / "bundle", "--prompt", words, "--max-tokens", 12, "--json")
    generated = json.loads(said.stdout)
    assert generated["text"].split() == bundle.tokenizer.decode(tokens).split()
    assert generated["prompt_tokens"] == 7 and generated["finish_reason"] == "length"

    timed = command("bench", tmp_path / "bundle", "--prompt-tokens", 6, "--new-tokens", 4, "--repeats", 1, "--json")
    assert json.loads(timed.stdout)["prefill_tokens_per_s"] > 0
    sites = json.loads((tmp_path / "bundle" / "manifest.json").read_text())["sites"]
    assert len(sites) == 6 + 2 * 10 and all(site["error"] < site["rtn_error"] * 1.01 for site in sites)
    checked = command("verify", tmp_path / "bundle", "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["verified"]
    with pytest.raises(RequestError, match="begins with a source"):
        bundle.session()
    with pytest.raises(RequestError, match="at most 64 tokens"):
        bundle.session(1, 1, np.full((1, 65), 3))
    with pytest.raises(RequestError, match="all padding"):
        bundle.session(1, 1, source[:1], 0 * mask[:1])


def test_what_cannot_work_is_refused_before_any_work(tmp_path: Path) -> None:
    save(tmp_path / "model", *TEXT["BART"])
    for step, reason in (
        ({"kv_cache": {"scheme": "INT8_G16"}}, "is not a decoder, whose caches alone are packed"),
        (
            {"squeezellm": {"scheme": "LUT4", "targets": "re:.*"}},
            "gradients are not followed through an encoder-decoder",
        ),
    ):
        done = command("plan", recipe_of(tmp_path, [step]))
        assert done.exit_code == 2 and reason in " ".join(done.output.split()), done.output
    assert not (tmp_path / "bundle").exists()


def test_browsers_answer_a_source(
    tmp_path: Path, require_adapter: None, require_tool: Callable[[str], Path], open_page: Callable[..., Any]
) -> None:
    """Logits of both engines against transformers in float64; tokens in Node and in a page."""
    require_tool("wasm-ld")
    model = saved_bart(tmp_path)
    passes = [{"rtn": {"scheme": "W4A16_G32", "targets": "re:.*", "ignore": ["lm_head"]}}]
    nothing = {"calibration": None, "evaluation": None, "gates": {}}
    done = command("run", recipe_of(tmp_path, passes, target="webgpu", **nothing), "-o", tmp_path / "bundle")
    assert done.exit_code == 0, done.output
    bundle = tmp_path / "bundle"
    take_stored_weights(model, bundle)
    rng = np.random.default_rng(2)
    source, ids, mask = rng.integers(3, VOCAB, (2, 7)), rng.integers(3, VOCAB, (2, LENGTH)), np.ones((2, 7), np.float32)
    mask[1, 4:] = 0
    exact = model.double()(*(torch.from_numpy(x) for x in (source, mask)), decoder_input_ids=torch.from_numpy(ids))
    for engine in ("webgpu", "wasm"):
        session = WebBundle(bundle, engine).session(2, LENGTH, source, mask)  # type: ignore[arg-type]
        steps = [session.step(ids[:, :3], np.arange(3)), *(session.step(ids[:, [i]]) for i in range(3, LENGTH))]
        assert relative(np.concatenate(steps, 1), exact.logits) < 1e-5, engine

    main = json.loads((bundle / "webgpu.json").read_text())
    linears = [
        sum(step["kernels"][0].startswith("packed_linear") for step in entry["steps"])
        for entry in (main, main["encode"])
    ]
    assert linears == [2 * 8, 6 + 2 * 2]  # keys and values of what the two layers attend to are the encoder's

    tokens, given = expected_tokens(model, torch.from_numpy(source[:1]), 12), source[0].tolist()
    assert len(set(tokens)) > 1
    in_turns = """
        const ids = [];
        for await (const id of model.generateIds(given, { maxTokens: 12 })) ids.push(id);
        const again = [], drawn = { maxTokens: 3, temperature: 1, seed: 1 };
        for await (const id of model.generateIds(given.slice(0, 3), drawn)) again.push(id);
        const refused = await model.session(9).catch((error) => [error.code, error.message]);
        return [ids, again.length, refused];"""
    found = in_node(bundle, in_turns, given)
    assert found[:2] == [tokens, 3]
    assert found[2] == ["request", "an encoder-decoder's session begins with a source: give a text or token ids"]
    page = open_page(bundle)
    assert page.evaluate(f"async (given) => {{ {in_turns} }}", given) == found
    page.fill("#prompt", " ".join(f"w{i}" for i in given))
    page.fill("#tokens", "12")
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent")
    assert page.inner_text("#text").split() == [f"w{i}" for i in tokens]


def test_biases_of_distances_are_served(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    """More tokens than the distances that a T5 tells apart, and a head that is not tied."""
    require_tool("g++")
    passes = [{"gptq": {"scheme": "W4A16_G32", "targets": "re:.*", "ignore": ["lm_head"]}}]
    cls, options = TEXT["FLAN-T5"]
    # As many layers in both halves: transformers' own cache has as many as the encoder.
    model = save(tmp_path / "model", cls, {**options, "num_layers": 1, "num_decoder_layers": 1})
    model.generation_config.update(suppress_tokens=[2])  # else it ends at once
    model.generation_config.save_pretrained(tmp_path / "model")
    recipe = recipe_of(tmp_path, passes, evaluation=None, gates={})
    bundle = compressor.compress(None, recipe, tmp_path / "bundle")
    take_stored_weights(model, tmp_path / "bundle")
    source = np.random.default_rng(2).integers(3, VOCAB, 31)
    tokens = expected_tokens(model, torch.from_numpy(source[None]), 40)
    assert list(bundle.generate_ids(source, max_tokens=40)) == tokens and len(set(tokens)) > 3
