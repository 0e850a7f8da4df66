"""The target null: the whole job without a compiler, and nothing that claims to have run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_caches import with_prices

from compressor.errors import GateError
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe

pytestmark = pytest.mark.usefixtures("captures_once")

PASSES = [{"rtn": {"scheme": "W4A16_G32", "ignore": "lm_head"}}]


def recipe(model: Path, **keys: object) -> Recipe:
    return Recipe.from_dict({"model": str(model), "passes": PASSES, "target": "null", **keys})


def test_the_job_runs_and_claims_nothing(small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(with_prices(tmp_path / "cache")))
    outcome = run_recipe(recipe(small_llama), tmp_path / "bundle", dump=tmp_path / "dump")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["format"] == "compressor null bundle" and manifest["formats"] == ["W4A16_G32"]
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"none"}
    assert any(kernel.get("format") == "W4A16_G32" for kernel in manifest["kernels"])
    assert set(manifest["files"]) == {"compress.lock", "tokenizer.json"}
    assert manifest["weight_bytes"] == outcome.metrics["weight_bytes"] < outcome.metrics["dense_weight_bytes"]
    assert outcome.kernel_error is None and not outcome.checks and "decode_tokens_per_s" not in outcome.metrics
    assert any("generates no kernels" in note for note in outcome.notes)
    phases = sorted(path.name for path in (tmp_path / "dump").glob("lower_*"))
    assert phases[:2] == ["lower_01_fuse.txt", "lower_02_bundle_parameters.py"] and any(
        "plan_memory" in name for name in phases
    )
    ratio = {name: predicted / measured for name, predicted, measured, _ in outcome.predictions}
    assert 0.9 < ratio["bundle_bytes"] < 1.1 and ratio["weight_bytes"] == 1
    again = run_recipe(recipe(small_llama), tmp_path / "bundle")  # takes the place of the former one
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text()) == manifest and again.metrics


def test_a_gate_on_what_cannot_be_measured_fails(small_llama: Path, tmp_path: Path) -> None:
    gated = recipe(small_llama, gates={"perplexity": "<= 20"}, evaluation="python_docs_heldout")
    with pytest.raises(GateError, match="perplexity: expected <= 20, not measured"):
        run_recipe(gated, tmp_path / "bundle")
