"""Bundles for ARM on processors that QEMU emulates: each has what its level needs and lacks the next level's.

A Python of aarch64 runs the bundle's own run-time over its own libraries; it takes six seconds of CPU to start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compressor_runtime import BundleError, load
from missing import skip_or_fail
from torch import nn

from compressor.capture.capture import capture
from compressor.data.text import load_evaluation
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.host import emulation
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.report.outcome import Outcome
from compressor.run.job import run_recipe
from compressor.verify.smoke import BLOCKED

X = np.random.default_rng(0).standard_normal((5, 64), np.float32)
RUN = """
import resource, sys

bundle, inputs, output, better, blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
sys.path.insert(0, bundle)  # its own run-time

import numpy as np
from compressor_runtime import BundleError, cpu, load

loaded, x = load(bundle, threads=1), np.load(inputs)
print(loaded.library, flush=True)
np.save(output, loaded.run(x))
if better:
    try:
        load(bundle, threads=1, isa=better)
    except BundleError as error:
        print(error, flush=True)
    cpu.missing_features = lambda required: []  # a wrong library, by force
    load(bundle, threads=1, isa=better).run(x)
    print("ran", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_qemu() -> None:
    if reason := emulation.why_not():
        skip_or_fail(reason)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def compiled_only(tmp_path_factory: pytest.TempPathFactory, module: nn.Module) -> Outcome:
    """Run a recipe for all levels on a machine without QEMU."""
    passes = [{"rtn": {"scheme": "W8A8", "targets": "Linear"}}]
    recipe = Recipe.from_dict({"passes": passes, "tune": "off", "target": "arm"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "why_not", lambda: "qemu-aarch64-static is not on PATH")
        folder = tmp_path_factory.mktemp("arm") / "bundle"
        return run_recipe(recipe, folder, model=module, example=(torch.from_numpy(X),))


def test_without_an_emulator_kernels_are_compiled_and_the_run_says_so(compiled_only: Outcome) -> None:
    manifest = json.loads((compiled_only.bundle / "manifest.json").read_text())
    levels = {(kernel["isa"], kernel["evidence"]) for kernel in manifest["kernels"] if "isa" in kernel}
    assert levels == {(isa, "compiled") for isa in ("neon", "dotprod", "i8mm")}
    assert compiled_only.kernel_error is None
    assert any("nothing was measured: qemu-aarch64-static is not on PATH" in note for note in compiled_only.notes)
    with pytest.raises(BundleError, match="are for ARM processors of 64 bits, and this machine is"):
        load(compiled_only.bundle)


@pytest.mark.parametrize(
    ("cpu", "library", "better"),
    [("cortex-a53", "model.so", "dotprod"), ("max", "model_i8mm.so", "")],
)
def test_a_cpu_takes_the_best_it_has_and_refuses_what_would_end_it(
    cpu: str, library: str, better: str, compiled_only: Outcome, module: nn.Module, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", X)
    files = [str(compiled_only.bundle), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    command = [*emulation.launcher(cpu), sys.executable, "-c", RUN, *files, better, ",".join(BLOCKED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout.splitlines()
    assert said and said[0] == library, done.stderr
    graph = Rtn("W8A8", targets="Linear").run(capture(module, (torch.from_numpy(X),)), Context())
    expected = graph(torch.from_numpy(X)).numpy()
    assert np.abs(np.load(tmp_path / "y.npy") - expected).max() <= 1e-5 * np.abs(expected).max()
    if better:
        assert said[1:] == [f"{compiled_only.bundle}: this CPU lacks asimddp; compress again for this CPU"]
        assert done.returncode == -signal.SIGILL, done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_a_run_measures_quality_under_emulation_and_times_nothing(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("emulated kernels were timed")

    monkeypatch.setattr("compressor.run.job.measure_speed", refuse)
    text = {"text": "python_docs_heldout.txt", "tokens": 96, "window": 64, "stride": 64}
    step = {"scheme": "W4A8_G32", "targets": r"re:.*_proj"}
    content = {"model": str(small_llama), "passes": [{"rtn": step}], "evaluation": text, "tune": "off"}
    recipe = Recipe.from_dict({**content, "target": {"arm": {"isa": "dotprod"}}})
    outcome = run_recipe(recipe, tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"emulated"}
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    assert any("emulated (QEMU, cortex-a76)" in note for note in outcome.notes)
    graph = Rtn(**step).run(capture(small_llama), Context())
    tokens, _ = load_evaluation(recipe.evaluation, None, small_llama, graph.meta["model"].vocab_size)
    expected = measure_quality(GraphLogits(graph), tokens, window=64, stride=64).metrics()["perplexity"]
    assert outcome.metrics["perplexity"] == pytest.approx(expected, rel=1e-3)
