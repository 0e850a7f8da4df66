"""Bundles for GPUs by whole runs: beside a fake driver, without a GPU, and what is refused before work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lockstep
import numpy as np
import pytest
import torch
from captures import capture_once
from fake_gpu import on_fake_gpu
from lockstep.compile import home, ptxas_report
from tiny_models import relative_error
from torch import nn

from compressor.cli.contents import inspect_path
from compressor.codegen.gpu import toolchain
from compressor.codegen.targets import cuda
from compressor.codegen.targets.cuda import Cuda
from compressor.errors import RecipeError, ToolchainError, UsageError, VerificationError
from compressor.evaluate.quality import GraphLogits
from compressor.passes.embedding import Embedding
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.run.cuda import CudaBackend
from compressor.run.job import run_recipe
from compressor.verify.bundle import verify_bundle

pytestmark = pytest.mark.usefixtures("captures_once")

PASSES: list[dict[str, Any]] = [
    {"rtn": {"scheme": "W4A16_G32", "targets": "Linear"}},
    {"embedding": {"scheme": "W8A16"}},
]
NORM = "rms_norm_32_1em06"
REPORT = """
ptxas info    : Compiling entry function '{0}_kernel' for 'sm_80'
ptxas info    : Function properties for {0}_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 376 bytes cmem[0]
ptxas info    : Compiling entry function '{0}_kernel' for 'sm_90'
ptxas info    : Function properties for {0}_kernel
    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers
ptxas info    : Compiling entry function '{0}_kernel_1' for 'sm_90'
ptxas info    : Function properties for {0}_kernel_1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem
"""


@pytest.fixture
def fake_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile CUDA text for the fake driver, in place of nvcc."""
    lockstep.stand_in_for_nvcc(monkeypatch, REPORT.format("rms_norm_32_1em06"))


def recipe(model: Path, **keys: object) -> Recipe:
    return Recipe.from_dict({"model": str(model), "passes": PASSES, "target": "cuda", **keys})


@pytest.mark.usefixtures("fake_nvcc")
def test_a_bundle_decodes_what_the_graph_does(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "capability_here", lambda: None)
    outcome = run_recipe(recipe(small_llama), tmp_path / "bundle")
    assert outcome.kernel_error is None and any("compiled, not executed" in note for note in outcome.notes)
    assert any(f"{NORM} 12 B" in note for note in outcome.notes)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert (manifest["schema_version"], manifest["device"]) == (3, "cuda")
    assert manifest["cuda_capabilities"] == ["sm_80", "sm_90", "sm_100", "compute_100"]
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"compiled"}
    norm = next(
        kernel for kernel in inspect_path(tmp_path / "bundle")["kernels"] if kernel["name"] == "rms_norm_32_1em06"
    )
    assert (norm["registers"], norm["spill_bytes"], norm["shared_bytes"]) == (64, 12, 1024)
    assert "nvidia-cuda-runtime==13.0.*" in (tmp_path / "bundle" / "README.md").read_text()
    ratio = {name: predicted / measured for name, predicted, measured, _ in outcome.predictions}
    assert ratio["weight_bytes"] == 1

    graph = capture_once(small_llama)
    for step in (Rtn("W4A16_G32", targets="Linear"), Embedding("W8A16")):
        graph = step.run(graph, Context())
    ids = np.random.default_rng(0).integers(3, 200, (2, 9))
    code = """
bundle = load(sys.argv[1])
ids = np.array(eval(sys.argv[2]))
session = bundle.session(2, 5)
parts = [session.step(ids[:, :4], np.arange(4)), *(session.step(ids[:, [i]]) for i in range(4, 9))]
print(fake.lockstep_replays(), session.capacity)
np.save(sys.argv[3], np.concatenate(parts, axis=1))
"""
    done = on_fake_gpu(code, tmp_path / "bundle", ids.tolist(), tmp_path / "logits.npy")
    assert (done.returncode, done.stdout) == (0, "4 10\n"), done.stderr
    assert relative_error(np.load(tmp_path / "logits.npy"), GraphLogits(graph)(ids)) < 1e-5


@pytest.mark.usefixtures("fake_nvcc")
def test_where_there_is_a_gpu_the_run_checks_and_measures(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "capability_here", lambda: (9, 0))
    monkeypatch.setattr("compressor_runtime.device.driver.capability_here", lambda: (9, 0))
    monkeypatch.setattr("compressor.run.job.measure_speed", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(CudaBackend, "timed", False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(home()))
    outcome = run_recipe(recipe(small_llama), tmp_path / "bundle")
    assert outcome.kernel_error is not None and outcome.kernel_error < 1e-4
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {kernel["evidence"] for kernel in manifest["kernels"]} == {"executed"}
    checks = {check.name: check for check in verify_bundle(tmp_path / "bundle").checks}
    assert checks["kernels"].passed and checks["schema"].passed and checks["bytes"].passed, checks
    monkeypatch.setattr("compressor_runtime.device.driver.capability_here", lambda: None)
    skipped = {check.name: check for check in verify_bundle(tmp_path / "bundle").checks}["kernels"]
    assert skipped.passed is None and "there is none here" in skipped.detail


def test_functions_of_a_kernel_are_reported_together() -> None:
    usage = toolchain.read_usage(REPORT.format("norm") + REPORT.format("norm_1"))
    assert usage["norm_kernel"] == toolchain.Usage(40, 12, 256) and len(usage) == 4
    assert toolchain.usage_of("norm", usage) == {"registers": 64, "spill_bytes": 12, "shared_bytes": 1024}
    assert toolchain.usage_of("nor", usage) == {}


def test_dynamic_shared_memory_has_one_name_and_one_type() -> None:
    text = "extern __shared__ __align__(64) float a[];\nextern __shared__ int a[];"
    found = toolchain.with_one_dynamic_array(text)
    assert found.count("unsigned char compressor_dynamic[];") == 2
    assert "float* a = reinterpret_cast<float*>(compressor_dynamic);" in found and "int* a" in found


def test_archs() -> None:
    assert Cuda().resolve().archs == ("sm_80", "sm_90", "sm_100", "compute_100")
    assert Cuda(("sm_100", "sm_80")).resolve().archs == ("sm_80", "sm_100")
    assert Cuda("sm_90").resolve().archs == ("sm_90",)
    with pytest.raises(UsageError, match="arch names no GPU"):
        Cuda(()).resolve()


def test_an_arch_that_is_unknown_is_refused_with_the_line(small_llama: Path) -> None:
    with pytest.raises(RecipeError, match=r"arch: 'sm_70' does not fit"):
        recipe(small_llama, target={"cuda": {"arch": "sm_70"}})


def test_without_nvcc_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain.find_nvcc.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_HOMES", ())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ToolchainError, match=r"nvcc is not on PATH.*pip install 'compressor\[cuda\]'"):
        Cuda().check_toolchain()


def test_cuda_that_nvcc_refuses_ends_with_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'kernels.cu(3): error: no such thing' >&2\nexit 2\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    with pytest.raises(ToolchainError, match=r"nvcc refuses the kernels: .*\n.*no such thing"):
        toolchain.compile_fatbin("", ["sm_90"])


def test_a_library_without_device_code_is_an_error() -> None:
    class Module:
        kind, imports = "llvm", ()

    class Executable:
        mod = Module()

    with pytest.raises(VerificationError, match="TVM made no device code"):
        toolchain.check_device_module(Executable(), {})
    Module.kind = "cuda"
    with pytest.raises(VerificationError, match=r"more shared memory than a block may have: \{'a': 300000\}"):
        toolchain.check_device_module(Executable(), {"a": toolchain.Usage(1, 0, 300000)})


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("LUT3", "no tables of values"), ("W4A16_G32_S1", "do not read what _S1 stores")],
)
def test_formats_without_kernels_are_refused_before_any_pass(
    small_llama: Path, tmp_path: Path, scheme: str, reason: str
) -> None:
    passes = [{"rtn": {"scheme": scheme, "targets": "Linear", "ignore": "lm_head"}}]
    with pytest.raises(RecipeError, match=reason):
        run_recipe(recipe(small_llama, passes=passes), tmp_path / "bundle")


def test_operators_without_kernels_are_refused_by_family() -> None:
    graph = capture_once(Convolution(), (torch.zeros(1, 3, 8, 8),))
    with pytest.raises(UsageError, match="the target cuda has no kernels for convolutions"):
        CudaBackend(Cuda()).check(graph)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x)


def test_nvcc_compiles_for_all_archs() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(32) a_kernel(float* x) { x[threadIdx.x] = 1; }'
    ptxas_report(text)  # skips where there is no nvcc
    image, report = toolchain.compile_fatbin(text, Cuda().resolve().archs)
    assert len(image) > 1000 and toolchain.read_usage(report)["a_kernel"].registers > 0
