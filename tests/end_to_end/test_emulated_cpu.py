"""Kernels for AVX2 on a processor that has no more: one that QEMU emulates, since machines with AVX512 hide mistakes.

QEMU translates every instruction of the process, and has none of AVX512: one of those ends it with SIGILL.  It emulates
``cpuid`` but hands /proc/cpuinfo of the machine on, so the processes get a file in its place; ``-L`` puts it there.
What they compute in float32 is exact, fused multiply-adds included, so results must be the same to the bit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.capture.capture import capture
from compressor.codegen.targets.x86 import AVX2, AVX512_VNNI, X86
from compressor.graph.model import weight_bytes
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.verify.smoke import BLOCKED

CPU = "Haswell-noTSX"  # the first with all of AVX2, FMA and F16C
FLAGS = ("fpu", "sse", "sse2", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", *AVX2.cpu_flags)
FORMATS = {  # a way through the kernels each: bytes of 4 and of 8 bits, integers and floats to floats, tables, planes
    "q": "W4A8_G32", "k": "W8A8", "v": "W8A16", "o": "NVFP4", "(gate|up)": "NF4_G64", "down": "BAL1A2_G32",
}  # fmt: skip
RUN = """
import resource, sys

bundle, output, blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))  # tvm_ffi would import torch, which takes long here
sys.path.insert(0, bundle)  # its own run-time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # QEMU would write one

import numpy as np
from compressor_runtime import BundleError, load
from compressor_selfcheck import compare
from numpy._core._multiarray_umath import __cpu_features__ as features

print("avx2", features["AVX2"], "avx512", features["AVX512F"], flush=True)  # from cpuid
try:
    loaded = load(bundle, threads=1)
except BundleError as error:
    sys.exit(str(error))
session = loaded.session(capacity=8)  # must grow
logits = [session.step([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]], np.arange(10)), session.step([[5]]), session.step([[8]])]
errors, tolerance = compare(loaded)
assert max(errors.values()) <= tolerance, errors
np.save(output, np.concatenate(logits, axis=1))
"""


@pytest.fixture(scope="module")
def bundle_for(
    tmp_path_factory: pytest.TempPathFactory, random_llama: Callable[..., Any], write_module: Callable[..., Path]
) -> Callable[..., Path]:
    """``bundle_for("avx2", FORMATS)``: a decoder of one layer with some of its linears packed."""

    def make(isa: str, formats: dict[str, str]) -> Path:
        graph, context = capture(random_llama(num_hidden_layers=1)), Context()
        dense_weight_bytes = weight_bytes(graph)
        for name, scheme in formats.items():
            graph = Rtn(scheme, targets=rf"re:.*\.{name}_proj").run(graph, context)
        return write_module(graph, context, dense_weight_bytes, tmp_path_factory.mktemp(isa), isa)

    return make


@pytest.fixture
def emulate(require_tool: Callable[[str], Path], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``emulate(bundle, output, flags)`` runs a bundle on the emulated CPU, with these flags in /proc/cpuinfo."""
    qemu = require_tool("qemu-x86_64-static")

    def run(bundle: Path, output: Path, flags: tuple[str, ...] = FLAGS) -> subprocess.CompletedProcess[str]:
        root = tmp_path / "root"
        (root / "proc").mkdir(parents=True, exist_ok=True)
        (root / "proc" / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {' '.join(flags)}\n")
        return run_bundle([str(qemu), "-cpu", CPU, "-L", str(root)], bundle, output)

    return run


def run_bundle(before: list[str], bundle: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-B", "-c", RUN, str(bundle), str(output), ",".join(BLOCKED)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_avx2_kernels_compute_the_same_bits_on_a_cpu_without_avx512(
    bundle_for: Callable[..., Path], emulate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    if not X86().executes(AVX2):
        pytest.skip("this machine has no AVX2 to compare with")
    bundle = bundle_for("avx2", FORMATS)
    native = run_bundle([], bundle, tmp_path / "native.npy")
    assert native.returncode == 0, native.stderr
    emulated = emulate(bundle, tmp_path / "emulated.npy")
    assert emulated.returncode == 0, emulated.stderr
    assert emulated.stdout.split() == ["avx2", "True", "avx512", "False"]
    expected, got = np.load(tmp_path / "native.npy"), np.load(tmp_path / "emulated.npy")
    assert expected.shape == (1, 12, 60) and np.isfinite(expected).all() and expected.std() > 0
    assert np.array_equal(got, expected)


def test_avx512_kernels_are_refused_and_would_end_the_process(
    bundle_for: Callable[..., Path], emulate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The test above proves something: kernels with AVX512 do not get through."""
    bundle, output = bundle_for("avx512_vnni", {"(gate|up)": "NF4_G64"}), tmp_path / "logits.npy"
    refused = emulate(bundle, output)
    assert refused.returncode == 1 and "this CPU lacks avx512_vnni" in refused.stderr
    ended = emulate(bundle, output, (*FLAGS, *AVX512_VNNI.cpu_flags))  # a file that lies
    assert ended.returncode == -signal.SIGILL, ended.stderr
    assert ended.stdout.split() == ["avx2", "True", "avx512", "False"] and not output.exists()
