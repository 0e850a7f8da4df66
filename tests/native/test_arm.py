"""The C++ runner built for ARM by the documented command, on an emulated processor, with a bundle for x86."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from missing import skip_or_fail
from native_runner import edit_manifest, refused

from compressor.errors import ToolchainError
from compressor.host.wheels import tvm_ffi

SOURCE = Path(__file__).resolve().parents[2] / "export" / "native"


def test_a_cross_build_checks_files_as_elsewhere(
    require_tool: Callable[[str], Path], copy: Path, tmp_path: Path
) -> None:
    cmake, qemu, _ = (str(require_tool(name)) for name in ("cmake", "qemu-aarch64-static", "aarch64-linux-gnu-g++"))
    try:
        tvm_ffi("aarch64")
    except ToolchainError as error:
        skip_or_fail(error)
    built = tmp_path / "built"
    options = [f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'aarch64-linux.cmake'}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["-S", str(SOURCE), "-B", str(built), *options, "-DCMAKE_CXX_FLAGS_RELEASE=-O0"],
                    ["--build", str(built)]):  # fmt: skip
        done = subprocess.run([cmake, *command], capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stdout + done.stderr
    assert (built / "libtvm_ffi.so").is_file()  # beside it, and the only place where it is looked for

    def run() -> subprocess.CompletedProcess[str]:
        runner = [str(built / "compressor_run"), str(copy), "--ids", "1,2", "--threads", "1"]
        emulator = [qemu, "-cpu", "cortex-a53", "-L", "/usr/aarch64-linux-gnu"]
        return subprocess.run([*emulator, *runner], capture_output=True, text=True, timeout=120)

    edit_manifest(copy, lambda manifest: manifest.pop("libraries"))
    edit_manifest(copy, lambda manifest: manifest.update(cpu_features=["asimddp"]))
    refused(run(), 1, "this CPU lacks asimddp")
    edit_manifest(copy, lambda manifest: manifest.update(cpu_features=["asimd"]))
    refused(run(), 1, "libtvm_runtime.so: cannot be loaded")  # of x86; all hashes were right
    content = bytearray((copy / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(content)
    refused(run(), 4, "weights.safetensors", "SHA-256")
