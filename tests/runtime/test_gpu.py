"""Bundles for GPUs, loaded beside a fake driver: what is recorded, what grows, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import compressor_runtime
import lockstep
import pytest
from compressor_runtime.device.driver import serves
from fake_gpu import on_fake_gpu, run_on_fake_gpu
from tiny_bundle import TinyLanguageModel, edit_manifest, greedy, write_tiny_bundle

from compressor.runtime import Bundle, DamagedBundleError, RequestError, load


@pytest.fixture(scope="module")
def gpu_folder(tmp_path_factory: pytest.TempPathFactory, model: TinyLanguageModel) -> Path:
    lockstep.start()
    folder = tmp_path_factory.mktemp("tiny_gpu")
    return write_tiny_bundle(folder, model, lockstep.target(), ("sm_80", "sm_90", "compute_100"))


@pytest.fixture
def gpu_copy(gpu_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gpu_folder, tmp_path / "copy"))


def test_recorded_steps_compute_what_plain_ones_do(gpu_folder: Path, model: TinyLanguageModel) -> None:
    """A cache that grows is recorded anew; sessions of one bundle do not disturb each other's graphs."""
    code = """
bundle = load(sys.argv[1])
record, found = bundle._record, {}
ids = np.array([[3, 4, 5], [6, 7, 8]])
for name, kept in (("recorded", record), ("plain", None)):
    bundle._record = kept
    session, other = bundle.session(2, 4), bundle.session(1, 40)
    logits, apart = session.step(ids), other.step(ids[:1])
    chosen, replays = [], fake.lockstep_replays()
    for _ in range(12):
        chosen.append(logits[:, -1].argmax(-1).tolist())
        logits = session.step(np.array(chosen[-1])[:, None])
        other.step([[9]])
    found[name] = [chosen, logits.tolist(), other.step([[9]]).tolist(), fake.lockstep_replays() - replays]
    found[name].append([session.capacity, str(bundle.device.name)])
import json
print(json.dumps(found))
"""
    done = on_fake_gpu(code, gpu_folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (recorded, *logits, replays, place), (plain, *same, without, _) = found["recorded"], found["plain"]
    assert [list(row) for row in zip(*recorded, strict=True)] == [
        greedy(model, row, 12) for row in ([3, 4, 5], [6, 7, 8])
    ]
    assert recorded == plain and logits == same
    assert place == [16, "cuda:0"] and (replays, without) == (11 + 12, 0)  # all single steps but a session's first


def test_text_and_the_check_of_stored_vectors(gpu_folder: Path, bundle: Bundle) -> None:
    done = run_on_fake_gpu([str(gpu_folder / "compressor_runtime.py"), "--prompt", "the rain", "--max-tokens", "9"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(bundle.generate("the rain", max_tokens=9)) + "\n"
    checked = run_on_fake_gpu([str(gpu_folder / "compressor_selfcheck.py")])
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["passed"] and json.loads(checked.stdout)["device"] == "cuda:0"


def test_device_memory_is_given_back_and_measured(gpu_folder: Path) -> None:
    code = """
import gc
bundle = load(sys.argv[1], device="cuda")
assert bundle.read_bandwidth(1 << 16, 2) > 0
used = []
for _ in range(6):
    session = bundle.session(1, 20)
    session.step([[3, 4]])
    for _ in range(4):
        session.step([[5]])
    del session
    gc.collect()
    used.append(fake.lockstep_memory_used())
print(used[2] == used[-1], used)
"""
    done = on_fake_gpu(code, gpu_folder)
    assert done.stdout.startswith("True"), done.stdout + done.stderr


def test_what_a_gpu_lacks_is_said_before_anything_is_loaded(gpu_folder: Path) -> None:
    code = "try:\n    load(sys.argv[1])\nexcept compressor_runtime.BundleError as error:\n    print(error)"
    small = on_fake_gpu(code, gpu_folder, size_bytes=5000).stdout
    weight_bytes = json.loads((gpu_folder / "manifest.json").read_text())["weight_bytes"]
    assert f"the weights take {weight_bytes} bytes, and cuda:0 has 5000 of its 5000 bytes free" in small
    old = on_fake_gpu(code, gpu_folder, capability=75).stdout
    assert "cuda:0 has compute capability 7.5, and the kernels are for sm_80, sm_90, compute_100" in old
    assert on_fake_gpu(code, gpu_folder, capability=120).stdout == ""  # by PTX
    second = on_fake_gpu(code.replace("argv[1]", "argv[1], device='cuda:1'"), gpu_folder).stdout
    assert second.startswith("cuda:1: the driver finds 1 of them")


def test_a_session_that_does_not_fit_the_gpu_is_refused_with_the_numbers(gpu_folder: Path) -> None:
    code = """
bundle = load(sys.argv[1])
try:
    bundle.session(100, 40)
except compressor_runtime.RequestError as error:
    print(error)
"""
    done = on_fake_gpu(code, gpu_folder, size_bytes=300_000)
    assert "100 sequences of 40 tokens: their keys, values and states take 512000 bytes, and" in done.stdout, (
        done.stderr
    )
    assert "of the GPU's 300000 are free" in done.stdout


def test_memory_that_ends_while_kernels_run_is_said_with_the_numbers(gpu_folder: Path) -> None:
    code = """
bundle = load(sys.argv[1])
session = bundle.session(1, 40)
fake.lockstep_configure(90, ctypes.c_size_t(fake.lockstep_memory_used() + 100))
try:
    session.step(np.arange(30)[None], np.arange(30))
except compressor_runtime.BundleError as error:
    print(error)
"""
    done = on_fake_gpu(code, gpu_folder)
    assert "cuda:0" in done.stdout and "bytes" in done.stdout and "end what else uses the GPU" in done.stdout, (
        done.stderr
    )


def test_without_a_driver_the_message_says_what_to_do(gpu_folder: Path) -> None:
    code = "from compressor_runtime import load, BundleError\nimport sys\n"
    code += "try:\n    load(sys.argv[1])\nexcept BundleError as error:\n    print(error)"
    environment = {**os.environ, "PYTHONPATH": str(Path(compressor_runtime.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(gpu_folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("no NVIDIA driver (libcuda.so.1) on this machine"), done.stdout + done.stderr


@pytest.mark.parametrize("device", ["tpu", "cuda:x", 1])
def test_devices_that_do_not_exist(bundle_folder: Path, device: object) -> None:
    with pytest.raises(RequestError, match="give 'cpu', 'cuda' or 'cuda:1'"):
        load(bundle_folder, device=device)  # type: ignore[arg-type]


def test_kernels_for_another_device(bundle_folder: Path, gpu_folder: Path) -> None:
    with pytest.raises(RequestError, match="the bundle has kernels for cpu; compress again with `target: cuda`"):
        load(bundle_folder, device="cuda")
    with pytest.raises(RequestError, match="the bundle has kernels for cuda; compress again with `target: x86`"):
        load(gpu_folder, device="cpu")
    assert load(bundle_folder, device="cpu").device.name == "cpu"


def test_manifests_of_both_kinds_cannot_be_mixed(gpu_copy: Path) -> None:
    edit_manifest(gpu_copy, lambda m: m.update(schema_version=2))
    with pytest.raises(DamagedBundleError, match="`device` and `schema_version` do not agree"):
        load(gpu_copy)
    edit_manifest(gpu_copy, lambda m: (m.update(schema_version=3), m["files"].pop("lib/libtvm_runtime_cuda.so")))
    code = "try:\n    load(sys.argv[1])\nexcept compressor_runtime.DamagedBundleError as error:\n    print(error)"
    assert "`files` does not list lib/libtvm_runtime_cuda.so" in on_fake_gpu(code, gpu_copy).stdout


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_90"], (9, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_90"], (10, 0), False),
        (["sm_90"], (8, 9), False),
        (["sm_80", "compute_100"], (12, 0), True),
        (["compute_100"], (9, 0), False),
        ([], (9, 0), False),
    ],
)
def test_machine_code_serves_its_major_version_and_ptx_all_later_ones(
    archs: list[str], capability: tuple[int, int], runs: bool
) -> None:
    assert serves(archs, capability) is runs
