"""The x86 target: what it needs, what it says when that is missing, and a run for a CPU that this machine is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from compressor_runtime import BundleError, load

from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import ISAS
from compressor.errors import ToolchainError, UsageError
from compressor.recipe.recipe import Recipe
from compressor.registry import TARGETS
from compressor.run.job import run_recipe

pytestmark = pytest.mark.usefixtures("captures_once")


def test_without_a_compiler_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"g\+\+.*ziglang"):
        x86.X86().check_toolchain()


def test_native_on_a_machine_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x86, "host_flags", frozenset)
    with pytest.raises(UsageError, match="isa: avx2"):
        x86.X86().resolve()
    assert x86.X86("avx2").resolve().name == "avx2"


def test_native_takes_the_best_that_a_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("avx2", "avx512_vnni", "avx512_vpopcntdq"):
        flags = frozenset(ISAS[name].cpu_flags) | {"avx2"}
        monkeypatch.setattr(x86, "host_flags", lambda flags=flags: flags)
        assert x86.X86().resolve().name == name


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="nearest: x86"):
        TARGETS.find("x68")


def test_one_bundle_for_any_cpu(small_llama: Path, no_speed: None, tmp_path: Path) -> None:
    """Integer sums are exact, so that instruction sets agree closely; what this CPU lacks is compiled only."""
    passes = [{"rtn": {"scheme": "W4A8_G32", "targets": "Linear", "ignore": "lm_head"}}]
    content = {"model": str(small_llama), "passes": passes, "tune": "off", "target": {"x86": {"isa": "any"}}}
    outcome = run_recipe(Recipe.from_dict(content), tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    isas = [entry["isa"] for entry in manifest["libraries"]]
    assert isas == ["amx", "avx512_vnni", "avx2"] and manifest["libraries"][-1]["file"] == "model.so"
    here = {isa for isa in isas if x86.X86().executes(ISAS[isa])}
    assert {k["isa"] for k in manifest["kernels"] if k["evidence"] == "executed"} == here
    passed = {check.name for check in outcome.checks if check.passed}
    assert {name for name in passed if name.startswith("kernels")} == {f"kernels for {isa}" for isa in here}
    ids = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
    logits = [load(tmp_path / "bundle", isa=isa).session().step(ids) for isa in here]
    for other in logits[1:]:
        assert abs(other - logits[0]).max() < 1e-6 * abs(logits[0]).max()
    with pytest.raises(BundleError, match="has kernels for amx, avx512_vnni, avx2"):
        load(tmp_path / "bundle", isa="neon")


def test_for_another_machine_kernels_are_compiled_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_llama: Path
) -> None:
    monkeypatch.setattr(x86, "host_flags", frozenset)
    passes = [{"rtn": {"scheme": "W4A16_G32", "targets": "Linear"}}]
    recipe = Recipe.from_dict({"model": str(small_llama), "passes": passes, "target": {"x86": {"isa": "avx2"}}})
    outcome = run_recipe(recipe, tmp_path / "bundle")
    assert outcome.kernel_error is None and "perplexity" not in outcome.metrics
    assert any("nothing was measured" in note for note in outcome.notes)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"compiled"}
    assert "avx2" in manifest["cpu_features"]
