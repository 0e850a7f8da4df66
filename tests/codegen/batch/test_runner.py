"""Batches run by their runner beside the fake driver: it times, compares, blames, ends in time, and says what is so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
import pytest
import tvm
from lockstep.compile import home
from tvm.script import tirx as T

from compressor.codegen.batch.collect import Wanted
from compressor.codegen.batch.compile import compile_choice
from compressor.codegen.gpu import toolchain
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.targets.cuda import Cuda
from compressor.errors import ToolchainError, UsageError
from compressor.export.batch import BATCH, Batch, finish_batch, writing_batch
from compressor.host.digests import file_sha256


@dataclass(frozen=True)
class Way:
    """A schedule of the toy kernel: y = x + factor * w, whose result is written ``behind`` elements further."""

    factor: float
    behind: int = 0
    unread: int = 0


def toy(way: Way) -> tvm.tirx.PrimFunc:
    factor, behind = way.factor, way.behind

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        d0 = T.int64()
        d1 = T.int64()
        x = T.meta_var(parameter((d0, d1, 32), "float32"))
        w = T.meta_var(parameter((32,), "float32"))
        y = T.meta_var(parameter((d0, d1, 32), "float32"))
        if d0 * d1 == 1:
            with T.launch_thread("blockIdx.x", 1) as _block, T.launch_thread("threadIdx.x", 32) as t:
                y[0, 0, t + behind] = x[0, 0, t] + w[t] * T.float32(factor)
        else:
            with T.launch_thread("blockIdx.x", d1) as row, T.launch_thread("threadIdx.x", 32) as t:
                y[0, row, t] = T.float32(7)

    return kernel


def wanted(*ways: Way) -> Wanted:
    operands = [
        {"shape": [1, 1, 32], "dtype": "float32", "role": "input", "fill": 1.0},
        {"shape": [32], "dtype": "float32", "role": "weight", "fill": 0.0},
        {"shape": [1, 1, 32], "dtype": "float32", "role": "output", "fill": 0.0},
    ]
    makers = [(lambda way=way: toy(way)) for way in ways]
    return Wanted("toy_32:1", [dataclasses.asdict(way) for way in ways], makers, operands)


@pytest.fixture
def fake_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep.stand_in_for_nvcc(monkeypatch)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_batch(folder: Path, *choices: Wanted) -> Batch:
    target = Cuda(arch="sm_90")
    kernels = []
    with writing_batch(folder) as partial:
        for index, choice in enumerate(choices):
            name = f"kernels/{index}.so"
            made = compile_choice(choice, target, target.resolve(), partial / name)
            kernels.append({**made, "kernel": f"toy_{index}:1", "library": name})
        return finish_batch(partial, folder, kernels, "of_the_kernels", ("sm_90",))


def run(batch: Batch, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home()), "PYTHONPATH": ""}
    command = [sys.executable, "-B", str(batch.folder / "run.py"), "--copies=2", "--rounds=2", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("fake_nvcc")
def test_candidates_are_timed_compared_and_blamed(tmp_path: Path) -> None:
    beyond = Way(1.0, behind=1 << 20)
    batch = make_batch(
        tmp_path / "batch",
        wanted(Way(1.0), Way(2.0), beyond, Way(1.0, unread=1), Way(1.0, unread=2)),
        wanted(Way(3.0), Way(3.0, unread=1)),
    )
    content = json.loads((batch.folder / BATCH).read_text())
    functions = [candidate["function"] for candidate in content["kernels"][0]["candidates"]]
    assert functions == ["candidate_0", "candidate_1", "candidate_2", "candidate_0", "candidate_0"]
    assert batch.size_bytes < 64 << 20 and batch.digest == file_sha256(batch.folder / BATCH)
    done = run(batch, "--output", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    first, second, outside, same, _ = results["kernels"]["toy_0:1"]["candidates"]
    assert first["microseconds"] > 0 and first == same and first["least"] <= first["microseconds"] <= first["most"]
    assert second == {"error": "it computes other numbers than the others"}
    assert "candidate 2" in done.stderr and "microseconds" not in outside and outside["error"]
    assert len(results["kernels"]["toy_1:1"]["candidates"]) == 2 and results["complete"]
    assert results["device"]["name"] == "CPU in lockstep" and results["device"]["capability"] == [9, 0]
    assert results["batch"] == batch.digest and results["kernels_digest"] == "of_the_kernels"


@pytest.mark.usefixtures("fake_nvcc")
def test_a_batch_that_has_no_time_or_is_damaged_says_so(tmp_path: Path) -> None:
    batch = make_batch(tmp_path / "batch", wanted(Way(1.0), Way(1.0, unread=1)))
    file = tmp_path / "results.json"
    done = run(batch, "--seconds=0", "--output", str(file))
    assert done.returncode == 2 and "the time is over" in done.stderr and not file.exists()
    with (batch.folder / "kernels" / "0.so").open("ab") as library:
        library.write(b"x")
    done = run(batch, "--output", str(file))
    assert done.returncode == 2 and "damaged: kernels/0.so" in done.stderr and not file.exists()


@pytest.mark.usefixtures("fake_nvcc")
def test_candidates_that_do_not_compile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(text: str, _archs: Any) -> tuple[bytes, str]:
        if "candidate_1" in text:
            raise ToolchainError("nvcc refuses the kernels: too many registers")
        return lockstep.compile_text(text), ""

    monkeypatch.setattr(toolchain, "compile_fatbin", refusing)
    batch = make_batch(tmp_path / "batch", wanted(Way(1.0), Way(2.0)))
    candidates = json.loads((batch.folder / BATCH).read_text())["kernels"][0]["candidates"]
    assert "refused" not in candidates[0] and "too many registers" in candidates[1]["refused"]
    monkeypatch.setattr(toolchain, "compile_fatbin", lambda _text, _archs: refusing("candidate_1", ()))
    with pytest.raises(ToolchainError, match="too many registers"):
        make_batch(tmp_path / "none", wanted(Way(1.0), Way(2.0)))
    assert not (tmp_path / "none").exists()


def test_a_batch_takes_a_new_folder_and_is_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"), writing_batch(tmp_path / "full"):
        pass
    monkeypatch.setattr("compressor.export.batch.MOST_BYTES", 1000)
    with pytest.raises(UsageError, match=r"MB.*arch=sm_90"), writing_batch(tmp_path / "batch") as partial:
        finish_batch(partial, tmp_path / "batch", [], "of_the_kernels", ("sm_90",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    with writing_batch(tmp_path / "batch") as partial:
        kernels = [{"kernel": "toy:1", "candidates": [{}], "operands": [], "library": "kernels/0.so"}]
        batch = finish_batch(partial, tmp_path / "batch", kernels, "of_the_kernels", ("sm_90",))
    environment = {**os.environ, "LD_LIBRARY_PATH": "", "PYTHONPATH": ""}
    command = [sys.executable, "-B", str(batch.folder / "run.py"), "--output", str(tmp_path / "results.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no NVIDIA driver" in done.stderr and not (tmp_path / "results.json").exists()
    assert hashlib.sha256((batch.folder / BATCH).read_bytes()).hexdigest() == batch.digest
