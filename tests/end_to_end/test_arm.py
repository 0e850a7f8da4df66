"""Bundles for ARM on processors that QEMU emulates: each has what its level needs and lacks the next level's.

A Python of aarch64 runs the bundle's own run-time over its own libraries; it takes six seconds of CPU to start.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from compressor_runtime import BundleError, load
from kernel_cases import random_packed
from missing import skip_or_fail
from served_device import Server, served_under_qemu
from torch import nn

from compressor.capture.capture import capture
from compressor.codegen.kernels.linear import packed
from compressor.codegen.neon import I8MM
from compressor.codegen.remote_tuning import RemoteSession, RemoteTuner
from compressor.codegen.targets.arm import Arm
from compressor.codegen.tuning import Database
from compressor.data.text import load_evaluation
from compressor.errors import CompressorError, UsageError
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.formats.format import Format
from compressor.host import emulation
from compressor.host.remote.client import LostDeviceError, device_facts
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.report.outcome import Outcome
from compressor.run.job import run_recipe
from compressor.verify.smoke import BLOCKED

X = np.random.default_rng(0).standard_normal((5, 64), np.float32)
RUN = """
import pathlib, resource, sys

bundle, inputs, output, better, blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
sys.path.insert(0, bundle)  # its own run-time

import numpy as np
from compressor_runtime import BundleError, cpu, load, read_manifest

loaded, x = load(bundle, threads=1), np.load(inputs)
print(loaded.library, flush=True)
np.save(output, loaded.run(x))
try:
    load(bundle, threads=1, isa=better)
except BundleError as error:
    print(error, flush=True)
for features in ({"asimd", "asimddp"}, {"asimd", "asimddp", "i8mm"}):
    cpu._cpu_flags = lambda: features
    print(cpu.choose_library(pathlib.Path(bundle), read_manifest(pathlib.Path(bundle))), flush=True)
load(bundle, threads=1, isa=better).run(x)  # a wrong library, by force
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


def test_a_cpu_takes_the_best_it_has_and_refuses_what_would_end_it(
    compiled_only: Outcome, module: nn.Module, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", X)
    files = [str(compiled_only.bundle), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    command = [*emulation.launcher("cortex-a53"), sys.executable, "-c", RUN, *files, "dotprod", ",".join(BLOCKED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    graph = Rtn("W8A8", targets="Linear").run(capture(module, (torch.from_numpy(X),)), Context())
    expected = graph(torch.from_numpy(X)).numpy()
    assert done.stdout.splitlines() == [
        "model.so",
        f"{compiled_only.bundle}: this CPU lacks asimddp; compress again for this CPU",
        "model_dotprod.so",
        "model_i8mm.so",
    ], done.stderr
    assert np.abs(np.load(tmp_path / "y.npy") - expected).max() <= 1e-5 * np.abs(expected).max()
    assert done.returncode == -signal.SIGILL, done.stderr


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


NAME = "emulated QEMU, cortex-a76"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served_under_qemu(tmp_path_factory.mktemp("board"), "cortex-a76") as server:
        yield server


def device_recipe(board: Server, **options: str) -> Recipe:
    passes = [{"rtn": {"scheme": "W8A8", "targets": "Linear"}}]
    return Recipe.from_dict({"passes": passes, "target": {"arm": {**options, "device": board.address}}})


def test_a_run_is_tuned_and_checked_on_the_board_and_its_times_say_nothing(
    board: Server, module: nn.Module, tmp_path: Path
) -> None:
    x = torch.ones(5, 64)
    outcome = run_recipe(device_recipe(board, isa="dotprod"), tmp_path / "bundle", model=module, example=(x,))
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {(kernel["evidence"], kernel["device"]) for kernel in manifest["kernels"]} == {("emulated", NAME)}
    assert "device" not in manifest["recipe"]["target"]["arm"]  # where it was checked is not in what others repeat
    assert any(f"checked on {NAME}, {board.address}, where speed says nothing" in note for note in outcome.notes)
    entries = {key: entry for key, entry in Database().entries.items() if f"|dotprod|{NAME}|" in key}
    assert entries and all(entry["index"] == 0 for entry in entries.values())
    assert {time for entry in entries.values() for time in entry["microseconds"]} == {None}


def test_a_level_that_the_board_lacks_is_refused_and_survived(board: Server, module: nn.Module, tmp_path: Path) -> None:
    said = re.escape(f"device {board.address}: {NAME} lacks i8mm, which i8mm needs; it has dotprod, neon: name one")
    with pytest.raises(UsageError, match=said):
        run_recipe(device_recipe(board, isa="i8mm"), tmp_path / "bundle", model=module, example=(torch.ones(5, 64),))
    target = Arm("i8mm", device=board.address)
    address = target.address()
    assert address is not None
    session = RemoteSession(address, device_facts(address))
    tuner = RemoteTuner.make("full", target.tvm_target(I8MM), I8MM, 1, "", None, session, target.link)  # by force
    fmt, rng = Format.parse("W8A8"), torch.Generator().manual_seed(0)
    parts = [part.numpy() for part in random_packed(fmt, 16, 64, rng).parts.values()]
    arrays = [np.ones((1, 1, 64), np.float32), *parts, np.zeros((1, 1, 16), np.float32)]
    space = [packed.Schedule(1, 1, 1), packed.Schedule(1, 1, 2)]
    with pytest.raises(CompressorError, match=r"none of the 2 candidates of k runs there: .* signal 4 \(Illegal"):
        tuner.choose("k", space, lambda one: packed.packed_linear(16, 64, fmt, False, I8MM, one), lambda: arrays)
    assert session.device().name == NAME  # it lives
    session.close()


def test_a_board_without_power_ends_the_run_before_it_begins(board: Server, module: nn.Module, tmp_path: Path) -> None:
    board.kill()
    with pytest.raises(
        LostDeviceError, match="Connection refused; check the address, and that `compress device serve`"
    ):
        run_recipe(device_recipe(board, isa="dotprod"), tmp_path / "bundle", model=module, example=(torch.ones(5, 64),))
    assert not list(tmp_path.iterdir())
