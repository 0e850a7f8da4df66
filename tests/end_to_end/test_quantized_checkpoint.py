"""A quantised checkpoint through the command: compressed anew, evaluated, or refused with nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from quantized_checkpoints import store_quantized
from tiny_models import save_model

from compressor.capture.capture import capture
from compressor.cli.commands import main

pytestmark = pytest.mark.usefixtures("no_speed", "one_thread")

RECIPE = """model: model
evaluation: {text: text.txt, tokens: 96}
passes: [rtn: {scheme: W4A16_G32, targets: Linear, ignore: [lm_head]}]
target: "null"
tune: "off"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a GPTQ checkpoint with its tokenizer, the recipe and a text."""
    root = tmp_path_factory.mktemp("quantized")
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 4
    (root / "text.txt").write_text(text, encoding="utf-8")
    (root / "recipe.yaml").write_text(RECIPE)
    model = save_model(root / "model", text)
    store_quantized(model, "gptq")
    return root


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(folder)

    def call(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="compress")

    return call


def test_plan_and_run(folder: Path, invoke: Callable[..., Result], own_cache: Path) -> None:
    planned = invoke("plan", "recipe.yaml", "--json")
    assert planned.exit_code == 0, planned.output
    result = invoke("run", "recipe.yaml", "-o", folder / "bundle", "--json")
    assert result.exit_code == 0, result.output
    manifest = json.loads((folder / "bundle" / "manifest.json").read_text())
    assert manifest["formats"] == ["W4A16_G32"] and len(manifest["sites"]) == 7
    dense = capture(folder / "model", weights=False)
    assert manifest["dense_weight_bytes"] == sum(p.numel() * p.element_size() for p in dense.parameters())
    assert "unpacked_bytes" not in manifest["model"] and dense.meta["model"].unpacked_bytes > 0
    assert json.loads(planned.stdout)["dense_weight_bytes"] == manifest["dense_weight_bytes"]
    assert not list((own_cache / "spilled").glob("*"))  # dense weights vanish with the process that wrote them


def test_its_own_codes_are_kept(folder: Path, invoke: Callable[..., Result], tmp_path: Path) -> None:
    """The shipped recipe: what is rounded besides is the embedding; without it, the model's quality stays as it was."""
    data = ("--set", "evaluation={text: text.txt, tokens: 96}", "--set", "tune=off")
    target = ("--set", "target={x86: {isa: avx2}}")  # the quickest to generate
    passes = ("--set", "passes=[keep_codes: {ignore: lm_head}]", "--set", "gates={perplexity_increase: '<= 0.001%'}")
    result = invoke(
        "run", "keep_codes_x86", "--model", folder / "model", *data, *passes, *target, "-o", tmp_path / "bundle"
    )
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["formats"] == ["W4A16_ASYM_G32"] and len(manifest["sites"]) == 7
    assert all(site["error"] == 0 for site in manifest["sites"])


def test_gates_on_what_is_not_measured_are_refused(invoke: Callable[..., Result]) -> None:
    result = invoke("plan", "recipe.yaml", "--set", "gates={latency_ms: '<= 2x dense', weight_bytes: '<= 1x dense'}")
    assert result.exit_code == 2
    assert "latency_ms: the dense model's is not measured: PyTorch does not load" in " ".join(result.stderr.split())


def test_a_contradiction_is_refused(folder: Path, invoke: Callable[..., Result], tmp_path: Path) -> None:
    config = folder / "model" / "config.json"
    before = config.read_text()
    stated = json.loads(before)
    stated["quantization_config"]["group_size"] = 64
    config.write_text(json.dumps(stated))
    try:
        for command in (("plan", "recipe.yaml"), ("run", "recipe.yaml", "-o", tmp_path / "out")):
            result = invoke(*command)
            errors = [line for line in result.stderr.splitlines() if line.lower().startswith("error: ")]
            assert result.exit_code == 2 and len(errors) == 1 and "Traceback" not in result.stderr
            assert "model.safetensors: model.layers.0.mlp.down_proj" in result.stderr.replace("\n", "")
        assert not list(tmp_path.iterdir())
    finally:
        config.write_text(before)
