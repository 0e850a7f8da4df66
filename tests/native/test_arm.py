"""The C++ runner built for ARM by the documented command, beside the Python run-time on the same emulated processor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from missing import skip_or_fail
from native_runner import PROMPT, Runner, figures, ids_of, refused

from compressor.host import emulation

SOURCE = Path(__file__).resolve().parents[2] / "export" / "native"
TOKENS = 30
KINDS = ("lookup", "recycle", "planes", "self", "sparse", "auto")
PYTHON = """
import json, sys

from compressor_runtime import load
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.pace import Always

bundle, prompt, tokens, kinds = sys.argv[1], *map(json.loads, sys.argv[2:])
loaded = load(bundle, threads=1)
print(json.dumps(list(loaded.generate_ids(prompt, max_tokens=tokens, speculate="off"))))
for kind in kinds:
    loaded._drafts = Drafts(64, Always(), loaded.entries, loaded.model)
    counts = Speculation(kind)
    ids = list(loaded.continued(prompt, tokens, checked_sampler(0.0, 0, 1.0, 0), [], counts))
    print(json.dumps([ids, counts.verifications, counts.drafted, counts.accepted, counts.steps]))
"""


@pytest.fixture(scope="module")
def arm_runner(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Runner:
    """``arm_runner(bundle, ids, *arguments, cpu=...)`` is the finished process, emulated."""
    if reason := emulation.why_not():
        skip_or_fail(reason)
    cmake, folder = str(require_tool("cmake")), tmp_path_factory.mktemp("arm-runner")
    require_tool("aarch64-linux-gnu-g++")
    options = [f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'aarch64-linux.cmake'}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["-S", str(SOURCE), "-B", str(folder), *options, "-DCMAKE_CXX_FLAGS_RELEASE=-O0"],
                    ["--build", str(folder)]):  # fmt: skip
        done = subprocess.run([cmake, *command], capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stdout + done.stderr

    def run(
        bundle: Path, ids: list[int], *arguments: object, cpu: str = "cortex-a76"
    ) -> subprocess.CompletedProcess[str]:
        emulator = [str(require_tool("qemu-aarch64-static")), "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu"]
        command = [str(folder / "compressor_run"), str(bundle), "--ids", ",".join(map(str, ids)), *map(str, arguments)]
        return subprocess.run([*emulator, *command], capture_output=True, text=True, timeout=120)

    return run


def test_drafts_give_the_tokens_and_counts_of_python(arm_runner: Runner, arm_bundle: Path) -> None:
    told = [str(arm_bundle), *map(json.dumps, (PROMPT, TOKENS, KINDS))]
    command = [*emulation.launcher("cortex-a76"), sys.executable, "-c", PYTHON, *told]
    python = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert python.returncode == 0, python.stderr
    plain, *drafted = map(json.loads, python.stdout.splitlines())
    options = ("--max-tokens", TOKENS, "--threads", 1)
    assert ids_of(arm_runner(arm_bundle, PROMPT, *options, "--speculate", "off")) == plain
    for kind, (ids, *counts) in zip(KINDS, drafted, strict=True):
        run = arm_runner(arm_bundle, PROMPT, *options, "--speculate", kind, "--draft-tokens", 15)
        assert ids_of(run) == ids == plain, kind
        assert figures(run, kind)[2:] == counts, kind
    refused(arm_runner(arm_bundle, PROMPT, cpu="cortex-a53"), 1, "this CPU lacks asimddp")
