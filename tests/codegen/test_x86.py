"""The x86 target: what it needs, what it says when that is missing, and a run for a CPU that this machine is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from compressor.codegen.targets import target_class, x86
from compressor.errors import ToolchainError, UsageError
from compressor.recipe import Recipe
from compressor.run import run_recipe


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


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="nearest: x86"):
        target_class("x68")


def test_for_another_machine_kernels_are_compiled_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(x86, "host_flags", frozenset)
    passes = [{"rtn": {"scheme": "W4A16_G128", "targets": "re:.*layers.0.*"}}]
    recipe = Recipe.from_dict({"model": "reference", "passes": passes, "target": {"x86": {"isa": "avx2"}}})
    outcome = run_recipe(recipe, tmp_path / "bundle")
    assert outcome.kernel_error is None and "perplexity" not in outcome.metrics
    assert any("nothing was measured" in note for note in outcome.notes)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"compiled"}
    assert "avx2" in manifest["cpu_features"]
