"""Bundles for ARM on processors that QEMU emulates: each has what its level needs and lacks the next level's.

A Python of aarch64 runs the bundle's own run-time over its own libraries; it takes seconds to start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_runtime import BundleError, load
from missing import skip_or_fail

from compressor.capture.capture import capture
from compressor.codegen.targets import arm
from compressor.evaluate.quality import GraphLogits
from compressor.host import emulation
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe
from compressor.run.outcome import Outcome
from compressor.verify.smoke import BLOCKED

SCHEMES = {"q": "W4A8_G32", "(gate|up)": "NF4_G32"}  # products of bytes, which levels differ in, and a table
PASSES = [{"rtn": {"scheme": scheme, "targets": rf"re:.*\.{name}_proj"}} for name, scheme in SCHEMES.items()]
PROMPT, COUNT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 8
RUN = """
import resource, sys

bundle, output, better, blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
sys.path.insert(0, bundle)  # its own run-time

import numpy as np
from compressor_runtime import BundleError, cpu, load

loaded = load(bundle, threads=1)
print(loaded.library, flush=True)
ids, logits, session = [[int(token) for token in sys.stdin.read().split()]], [], loaded.session()
for step in range(8):
    logits.append(session.step(ids)[0, -1])
    ids = [[int(logits[-1].argmax())]]
np.save(output, logits)
if better:
    try:
        load(bundle, threads=1, isa=better)
    except BundleError as error:
        print(error, flush=True)
    cpu.missing_features = lambda required: []  # a wrong library, by force
    load(bundle, threads=1, isa=better).session().step([[3, 1, 4, 1]])
    print("ran", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_qemu() -> None:
    if reason := emulation.why_not():
        skip_or_fail(reason)


def recipe(model: Path, target: dict[str, Any], **more: Any) -> Recipe:
    return Recipe.from_dict({"model": str(model), "passes": PASSES, "tune": "off", "target": {"arm": target}, **more})


@pytest.fixture(scope="module")
def compiled_only(tmp_path_factory: pytest.TempPathFactory, small_llama: Path) -> Outcome:
    """Run a recipe for all levels on a machine without QEMU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "why_not", lambda: "qemu-aarch64-static is not on PATH")
        return run_recipe(recipe(small_llama, {}), tmp_path_factory.mktemp("arm") / "bundle")


@pytest.fixture(scope="module")
def expected(small_llama: Path) -> np.ndarray[Any, Any]:
    """Compute logits of greedy steps in PyTorch, float32 [steps, vocabulary]."""
    graph, logits, ids = capture(small_llama), [], list(PROMPT)
    graph = Pipeline(recipe(small_llama, {}).passes).run(graph, Context())
    for _ in range(COUNT):
        logits.append(GraphLogits(graph)(np.array([ids]))[0, -1].numpy())
        ids.append(int(logits[-1].argmax()))
    return np.array(logits)


def emulate(cpu: str, bundle: Path, output: Path, better: str) -> subprocess.CompletedProcess[str]:
    command = [*emulation.launcher(cpu), sys.executable, "-c", RUN, str(bundle), str(output), better, ",".join(BLOCKED)]
    prompt = " ".join(map(str, PROMPT))
    return subprocess.run(command, input=prompt, capture_output=True, text=True, timeout=240, check=False)


def test_without_an_emulator_kernels_are_compiled_and_the_run_says_so(compiled_only: Outcome) -> None:
    manifest = json.loads((compiled_only.bundle / "manifest.json").read_text())
    assert {(kernel["isa"], kernel["evidence"]) for kernel in manifest["kernels"]} == {
        (isa, "compiled") for isa in ("neon", "dotprod", "i8mm")
    }
    assert compiled_only.kernel_error is None and "perplexity" not in compiled_only.metrics
    assert any("nothing was measured: qemu-aarch64-static is not on PATH" in note for note in compiled_only.notes)
    with pytest.raises(BundleError, match="are for ARM processors of 64 bits, and this machine is"):
        load(compiled_only.bundle)


@pytest.mark.parametrize(
    ("cpu", "library", "better"),
    [("cortex-a53", "model.so", "dotprod"), ("max", "model_i8mm.so", "")],
)
def test_a_cpu_takes_the_best_it_has_and_refuses_what_would_end_it(
    cpu: str,
    library: str,
    better: str,
    compiled_only: Outcome,
    expected: np.ndarray[Any, Any],
    tmp_path: Path,
) -> None:
    done = emulate(cpu, compiled_only.bundle, tmp_path / "logits.npy", better)
    said = done.stdout.splitlines()
    assert said and said[0] == library, done.stderr
    logits = np.load(tmp_path / "logits.npy")
    assert logits.argmax(1).tolist() == expected.argmax(1).tolist()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
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
    outcome = run_recipe(recipe(small_llama, {"isa": "dotprod"}, evaluation=text), tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"emulated"}
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    assert outcome.metrics["perplexity"] > 0 and "decode_tokens_per_s" not in outcome.metrics
    assert any("emulated (QEMU, cortex-a76)" in note for note in outcome.notes)
