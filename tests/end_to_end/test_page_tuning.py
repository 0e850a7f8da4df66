"""The page of a bundle in headless Chromium: tuning, encoders with integer products, float16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import GENERATE, PROMPT, READY, greedy
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.evaluate.quality import graph_hidden
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.run.job import run_recipe

WITHOUT_CLOCK = """const has = GPUSupportedFeatures.prototype.has;
  GPUSupportedFeatures.prototype.has =
    function (name) { return name !== 'timestamp-query' && has.call(this, name); };
"""
BUDGETS = (5000, 15000, 60000)
"""Milliseconds: the default, and those in which a software adapter, on a busy machine too, tries a few variants."""
TUNE = """async (budget) => {
  const seen = [];
  return [await model.tune({ ...(budget === 5000 ? {} : { budget }), onProgress: (p) => seen.push(p) }), seen];
}"""
TUNE_WRONG = """async (budgets) => {
  const { engine } = model;
  const pipeline = engine.pipeline.bind(engine);
  engine.pipeline = (name, record, constants = record.constants) => pipeline(name, constants === record.constants
    ? record : { ...record, source: record.source.replace(/sum \\+= /g, "sum = 0.0 * ") }, constants);
  for (const budget of budgets) {
    const report = await model.tune({ budget });
    if (report.kernels.some(({ name, tried }) => name.includes("linear") && tried)) return report;
  }
}"""


def test_tuning_keeps_what_is_faster_and_computes_the_same(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """Within its budget."""
    page = open_page(made[0])
    for budget in BUDGETS:
        report, progress = page.evaluate(TUNE, budget)
        kernels = report["kernels"]
        assert report["seconds"] < 1.1 * budget / 1000 and all(p["budget"] == budget for p in progress)
        if sum(kernel["tried"] for kernel in kernels) >= 3:
            break
    families = ("packed_linear", "cached_attention")
    assert {next(f for f in families if kernel["name"].startswith(f)) for kernel in kernels} == set(families)
    assert len(progress) >= 3
    as_good = [kernel for kernel in kernels if kernel["tuned_ms"] <= kernel["default_ms"] <= kernel["worst_ms"]]
    assert len(as_good) >= 0.8 * len(kernels), kernels
    for kernel in kernels:
        print(*(f"{key} {value}" for key, value in kernel.items()))
    expected = greedy(made[1], 32)
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == expected
    used = """Promise.all(Object.values(model.engine.kernels))
      .then((all) => Object.fromEntries(all.map(({ name, constants }) => [name, constants])))"""
    before = page.evaluate(used)
    assert all(before[kernel["name"]] == kernel["constants"] for kernel in kernels)
    page.reload()
    page.wait_for_function(READY)
    assert page.evaluate(used) == before
    assert page.evaluate(GENERATE, [PROMPT, {"maxTokens": 32}]) == expected
    page.evaluate("Object.keys(localStorage).forEach((key) => localStorage.setItem(key, '{\"LANES\": 3}'))")
    page.reload()
    page.wait_for_function(READY)
    shipped = json.loads((made[0] / "webgpu.json").read_text())["kernels"]
    assert page.evaluate(used) == {name: record["constants"] for name, record in shipped.items()}


def test_a_variant_that_computes_something_else_is_not_taken(
    made: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """Variants whose text drops the sums are fastest, and wrong."""
    page = open_page(made[0])
    report = page.evaluate(TUNE_WRONG, BUDGETS)
    linears = [kernel for kernel in report["kernels"] if "linear" in kernel["name"]]
    assert linears
    shipped = json.loads((made[0] / "webgpu.json").read_text())["kernels"]
    assert all(kernel["constants"] == shipped[kernel["name"]]["constants"] for kernel in linears)


@pytest.fixture(scope="module")
def encoder(
    tmp_path_factory: pytest.TempPathFactory, require_adapter: None, require_tool: Callable[[str], Path]
) -> tuple[Path, GraphModule]:
    """Make a bundle of a tiny random encoder with the reference model's tokenizer, and its graph."""
    from tiny_models import SIZES, build, quantized, transformers

    require_tool("wasm-ld")
    folder = tmp_path_factory.mktemp("encoder")
    config = transformers.BertConfig(**{**SIZES, "vocab_size": 2048, "pad_token_id": 0})
    build(config, transformers.AutoModel).save_pretrained(folder / "model")
    shutil.copyfile(resource("models") / "reference" / "tokenizer.json", folder / "model" / "tokenizer.json")
    (folder / "recipe.yaml").write_text(
        f"model: {folder / 'model'}\npasses:\n  - rtn: {{scheme: W4A8_G32}}\ntarget: webgpu\n"
    )
    outcome = run_recipe(load_recipe(folder / "recipe.yaml"), folder / "bundle")
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    return outcome.bundle, quantized(capture(folder / "model"), "W4A8_G32")


WITHOUT_PRODUCT = "Object.defineProperty(GPU.prototype, 'wgslLanguageFeatures', { get: () => new Set() });"


@pytest.mark.parametrize(
    ("engine", "script"), [("webgpu", ""), ("webgpu", WITHOUT_PRODUCT + WITHOUT_CLOCK), ("wasm", "")]
)
def test_an_encoder_embeds_texts(
    engine: str, script: str, encoder: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """With integer products, of the language and of a function in its place."""
    bundle, graph = encoder
    page = open_page(bundle, script, query=f"?device={engine}")
    if engine == "webgpu":
        assert ("fn dot4I8Packed" in page.evaluate("model.engine.polyfills")) == bool(script)
    for length in (12, 1, 40):
        ids = [int(i) for i in np.random.default_rng(length).integers(3, 2048, length)]
        found = page.evaluate(
            "async (ids) => { const x = await model.encode(ids); return [Array.from(x.data), x.shape]; }", ids
        )
        expected = np.asarray(graph_hidden(graph)(np.array([ids]), np.ones((1, length), np.float32)))[0]
        assert tuple(found[1]) == expected.shape
        assert np.abs(np.array(found[0]).reshape(expected.shape) - expected).max() < 1e-3
    page.click("#go")
    page.wait_for_function("document.getElementById('speed').textContent.includes('texts in')")
    assert len(page.inner_text("#text").splitlines()) == 2
    if engine == "webgpu":  # with the device's clock, and without
        report = page.evaluate("model.tune({ budget: 2000 })")
        assert all(kernel["tuned_ms"] <= kernel["default_ms"] for kernel in report["kernels"] if kernel["tried"])
        assert any(kernel["name"].startswith("masked_attention") for kernel in report["kernels"])
    refused = page.evaluate("model.session().then(() => '', (error) => error.message)")
    assert refused == "only a decoder generates"
    assert "takes between 1 and 64" in page.evaluate("model.encode(Array(65).fill(5)).then(() => '', (e) => e.message)")


def test_float16_is_taken_where_the_device_has_it(
    encoder: tuple[Path, GraphModule], open_page: Callable[..., Any]
) -> None:
    """The software adapter has none; kernels in float16 are executed in tests/codegen/test_web_kernels.py."""
    page = open_page(encoder[0], query="?device=webgpu&precision=f16")
    assert page.evaluate("[model.precision, model.engine.device.features.has('shader-f16')]") == ["f32", False]
    assert "WebGPU (f32)" in page.inner_text("#facts")
