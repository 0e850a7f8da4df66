"""Compile CUDA text: find nvcc, make machine code for several GPUs, and read what ptxas says of each kernel.

TVM emits device code only where its CUDA library is loaded, which needs a driver.  Where there is none, a stub that we
compile takes its place: it answers every call with "no device".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor_runtime.device.driver import find_cudart

from compressor.codegen.linker import find_compiler
from compressor.errors import ToolchainError, VerificationError

PTX = "compute_"
"""Begins the name of an arch whose intermediate code, not machine code, is in the bundle, for later GPUs."""

_HOMES = ("CUDA_HOME", "CUDA_PATH", "/usr/local/cuda")
"""Where a toolkit may be: folders, or variables that name them."""
_DRIVER_FUNCTIONS = (
    "cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString", "cuLaunchKernelEx",
    "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""What TVM's CUDA library takes from the driver."""
_NO_DEVICE = 100
_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\((\d+)\) )?(\w+) (\w+)\[\];")
_SHARED = re.compile(r"(\d+) bytes smem")
_SHARED_LIMIT_BYTES = 227 << 10  # of a block, on sm_90 and later; ptxas refuses more than 48 KiB of fixed size itself


@dataclass(frozen=True)
class Usage:
    """State what one device function takes on the GPU where it takes most of it.

    Attributes:
        registers: of a thread.
        spill_bytes: of a thread's values that did not fit into registers.
        shared_bytes: of a block, of fixed size.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


@functools.cache
def find_nvcc() -> Path:
    """Return nvcc: on PATH, in CUDA_HOME, in /usr/local/cuda, or of the PyPI packages of the extra ``cuda``.

    Raises:
        ToolchainError: it is in none of them.
    """
    if path := shutil.which("nvcc"):
        return Path(path)
    homes = [Path(os.environ.get(name, name)) for name in _HOMES]
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) / "cu13" for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for folder in (*homes, *packages):
        if (found := folder / "bin" / "nvcc").is_file():
            return found
    raise ToolchainError(
        "no CUDA compiler: nvcc is not on PATH, not in CUDA_HOME, and the packages that bring it are not installed; "
        "`pip install 'compressor[cuda]'`, or install NVIDIA's CUDA toolkit 12.8 or later"
    )


def compile_fatbin(text: str, archs: Sequence[str]) -> tuple[bytes, str]:
    """Compile CUDA text for several GPUs into one fat binary.

    Args:
        archs: ``sm_..`` for machine code, ``compute_..`` for PTX.
    Returns:
        The binary, and the report of ptxas.
    Raises:
        ToolchainError: there is no nvcc, or it refuses the text.
    """
    codes = [f"-gencode=arch=compute_{arch.rpartition('_')[2]},code={arch}" for arch in archs]
    with tempfile.TemporaryDirectory() as name:
        source, output = Path(name) / "kernels.cu", Path(name) / "kernels.fatbin"
        source.write_text(with_one_dynamic_array(text), encoding="utf-8")
        options = ["-fatbin", "-O3", "-std=c++17", "-w", "--threads=0", "--ptxas-options=-v"]
        command = [str(find_nvcc()), *options, *codes, f"--compiler-bindir={find_compiler()[0]}"]
        done = subprocess.run(
            [*command, "-o", str(output), str(source)], capture_output=True, text=True, check=False, cwd=name
        )
        if done.returncode:
            raise ToolchainError(f"nvcc refuses the kernels: {' '.join(command)}\n{done.stderr.strip()[:4000]}")
        return output.read_bytes(), done.stderr


def with_one_dynamic_array(text: str) -> str:
    """Let all kernels name their dynamic shared memory alike.

    TVM numbers it, and two kernels may use one number for elements of two types, which is one name declared twice.
    """
    array = "extern __shared__ __align__(128) unsigned char compressor_dynamic[];"
    return _DYNAMIC.sub(rf"{array} \2* \3 = reinterpret_cast<\2*>(compressor_dynamic);", text)


def read_usage(report: str) -> dict[str, Usage]:
    """Return what ptxas reports of each device function; of several GPUs, the largest numbers."""
    found: dict[str, Usage] = {}
    for match in _FUNCTION.finditer(report):
        shared = _SHARED.search(match["rest"])
        one = (int(match["registers"]), int(match["spilled"]), int(shared[1]) if shared else 0)
        known = found.get(match["name"])
        found[match["name"]] = Usage(
            *(one if known is None else map(max, one, (known.registers, known.spill_bytes, known.shared_bytes)))
        )
    return found


@contextlib.contextmanager
def device_code(archs: Sequence[str]) -> Iterator[dict[str, Usage]]:
    """Let TVM compile device code for these GPUs within the block; what each function takes is there at its end.

    Raises:
        ToolchainError: there is no nvcc, no CUDA run-time library, or nvcc refuses the kernels.
    """
    import tvm_ffi

    _load_tvm_cuda()
    usage: dict[str, Usage] = {}
    failed: list[Exception] = []

    def compile_text(text: str) -> bytes:
        try:
            image, report = compile_fatbin(text, archs)
        except ToolchainError as error:
            failed.append(error)  # TVM would make another kind of error of it
            raise
        usage.update(read_usage(report))
        return image

    with _replaced("tvm_callback_cuda_compile", compile_text, tvm_ffi):
        try:
            yield usage
        except Exception as error:
            if failed:
                raise failed[0] from error
            raise


def usage_of(kernel: str, usage: Mapping[str, Usage]) -> dict[str, Any]:
    """Return what the functions of one kernel take at most, as fields of its record; none where it has no function."""
    own = re.compile(re.escape(kernel) + r"_kernel(_\d+)?")
    taken = [one for name, one in usage.items() if own.fullmatch(name)]
    fields = ("registers", "spill_bytes", "shared_bytes")
    return {field: max(getattr(one, field) for one in taken) for field in fields} if taken else {}


def check_device_module(executable: Any, usage: Mapping[str, Usage]) -> None:
    """Make sure that kernels became code of a GPU, and that it can hold them.

    Raises:
        VerificationError: there is no device module, or a block takes more shared memory than a GPU has.
    """
    kinds, waiting = set[str](), [executable.mod]
    while waiting:
        module = waiting.pop()
        kinds.add(module.kind)
        waiting += list(module.imports)
    if "cuda" not in kinds:
        raise VerificationError("TVM made no device code: the kernels would run on the CPU; report it")
    large = {name: one.shared_bytes for name, one in usage.items() if one.shared_bytes > _SHARED_LIMIT_BYTES}
    if large:
        raise VerificationError(f"kernels take more shared memory than a block may have: {large}; report it")


@contextlib.contextmanager
def _replaced(name: str, function: Callable[..., Any], tvm_ffi: Any) -> Iterator[None]:
    """Register a global function for a block, and put back the one before."""
    before = tvm_ffi.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        if before is None:
            tvm_ffi.remove_global_func(name)
        else:
            tvm_ffi.register_global_func(name, before, override=True)


def _load_tvm_cuda() -> None:
    """Load TVM's CUDA library, over the driver, or over a stub where there is none.

    Raises:
        ToolchainError: CUDA's run-time library is missing.
    """
    import tvm
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None:
        return
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    except OSError:
        _load_stub()
    beside = [folder / name for folder in _toolkit_folders() for name in ("libcudart.so.13",)]
    cudart = find_cudart() or next((path for path in beside if path.is_file()), None)
    if cudart is None:
        raise ToolchainError("libcudart.so.13 is missing; `pip install 'compressor[cuda]'`")
    try:
        ctypes.CDLL(str(cudart), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(Path(tvm.__file__).parent / "lib" / "libtvm_runtime_cuda.so"))
    except OSError as error:
        raise ToolchainError(f"TVM's CUDA library cannot be loaded: {error}") from error


def _toolkit_folders() -> list[Path]:
    home = find_nvcc().resolve().parents[1]
    return [home / "lib", home / "lib64", home / "targets" / "x86_64-linux" / "lib"]


def _load_stub() -> None:
    """Compile a driver that has no device, and load it."""
    text = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in _DRIVER_FUNCTIONS)
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name) / "stub.c", Path(name) / "libcuda.so.1"
        source.write_text(text)
        command = [*find_compiler(), "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolchainError(f"the stub of CUDA's driver cannot be compiled: {done.stderr.strip()[:2000]}")
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
