"""Compile CUDA text for the CPU, and the fake driver that runs it: with g++, once per machine."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from missing import skip_or_fail

from compressor.codegen.gpu.toolchain import find_nvcc
from compressor.errors import ToolchainError

FLAGS = [
    "-std=c++20", "-O1", "-fPIC", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-w",
    "-U_FORTIFY_SOURCE", "-fno-gnu-unique",  # modules with kernels of the same name are apart
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",  # GPUs read vectors at multiples of their size only
]  # fmt: skip
WATCHED = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]  # races.cpp has what it calls
HERE = Path(__file__).parent
# What the text includes; our header has it all.
INCLUDED = ["cuda", "cuda_fp16", "cuda_bf16", "cuda_fp8", "math_constants", "mma"]
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')
_ALIGNED = re.compile(r"__shared__ alignas\((\d+)\)")  # g++ takes no standard attribute there
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def compiler() -> str | None:
    """Return the path of g++, or None where there is none."""
    return shutil.which("g++")


@cache
def home() -> Path:
    """Return the folder of what was compiled from these sources on this machine, with the header's precompiled form."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".cpp", ".py"))
    digest = hashlib.sha256(platform.node().encode())
    for path in sources:
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            made = Path(name) / "made"
            _make(made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                assert folder.exists()
    return folder


def _make(folder: Path) -> None:
    """Compile the driver's two libraries and the header."""
    folder.mkdir()
    for name in ("cuda_on_cpu.h", "cuda_numbers.h", "lockstep.h"):
        shutil.copy(HERE / name, folder)
    for name in INCLUDED:
        (folder / f"{name}.h").write_text("")
    gpp([*WATCHED, "-x", "c++-header", folder / "cuda_on_cpu.h", "-o", folder / "cuda_on_cpu.h.gch"])
    script = folder / "versions"
    script.write_text("libcudart.so.13 { global: *; };\n")
    runtime = folder / "libcudart.so.13"
    sources = [HERE / "driver.cpp", HERE / "fibers.cpp", HERE / "races.cpp"]
    gpp(["-shared", *sources, "-o", runtime, "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}", "-ldl"])
    (folder / "empty.cpp").write_text("")  # one library has the functions of both
    gpp(["-shared", folder / "empty.cpp", "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"])


def gpp(arguments: list[object]) -> None:
    """Run g++ with our flags; its errors become a RuntimeError's message."""
    done = subprocess.run(["g++", *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(map(str, arguments))}:\n{done.stderr[:8000]}")


def on_cpu(text: str) -> str:
    """Return C++ for g++ of CUDA text as TVM writes it."""
    body = _DYNAMIC.sub(r"\1* \2 = static_cast<\1*>(lockstep_dynamic());", text)
    body = _ALIGNED.sub(r"__shared__ __align__(\1)", body)
    names = sorted(set(_KERNEL.findall(text)))
    return "\n".join([body, *(f"LOCKSTEP_KERNEL({name})" for name in names)]) + "\n"


def compile_kernels(text: str) -> bytes:
    """Return the shared library of CUDA text: its size as eight bytes, and its bytes."""
    source = on_cpu(text)
    library = home() / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=home()) as name:
            (Path(name) / "kernels.cpp").write_text(source)
            header = ["-I", home(), "-include", home() / "cuda_on_cpu.h"]
            gpp([*WATCHED, *header, "-c", Path(name) / "kernels.cpp", "-o", Path(name) / "kernels.o"])
            gpp(["-shared", Path(name) / "kernels.o", "-o", Path(name) / "kernels.so"])  # without g++'s own library
            (Path(name) / "kernels.so").rename(library)
    image = library.read_bytes()
    return len(image).to_bytes(8, "little") + image


def ptxas_report(text: str, arch: str = "sm_90") -> str:
    """Compile CUDA text with nvcc and return ptxas's report of registers and spills.

    Where there is no nvcc, the test is skipped, and in CI it fails.

    Raises:
        RuntimeError: the text is not valid CUDA; the message is nvcc's.
    """
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        skip_or_fail(error)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "kernels.cu"
        source.write_text(text)
        command = [nvcc, f"-arch={arch}", "--ptxas-options=-v", "-w", "-cubin", "-o", f"{name}/kernels.cubin", source]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc: {done.stderr[:8000]}")
    return done.stderr
