"""CUDA kernels on a CPU: TVM compiles and runs them as on a GPU, and every thread is a fiber of this process.

A fake driver takes the place of ``libcuda.so.1`` and ``libcudart.so.13`` before TVM's CUDA runtime is loaded, and the
text that TVM writes for nvcc is compiled by g++ instead.  Threads of a block run one after another, each up to a
barrier or to an exchange with its warp: one that some threads do not reach is an error, and so are two accesses of
shared memory with no barrier in between (``races.cpp``).  Shared memory before each block and device memory when it is
allocated are full of 0xFF bytes, which are NaN.  Memory is in order, and a warp's lanes are not at the same place:
what needs a fence of global memory on a GPU is not seen here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from missing import skip_or_fail
from tvm.target import Target

from compressor.codegen.gpu import toolchain
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from lockstep.compile import compile_kernels, compiler, home

TARGET = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


def target() -> Any:
    """Return the GPU that kernels are compiled for."""
    return Target(TARGET, host="llvm")


@cache
def _driver() -> ctypes.CDLL | str:
    """Load the fake driver and TVM's CUDA runtime, once; or return why that cannot be."""
    if compiler() is None:
        return "g++ is not installed"
    if tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None:
        return "this machine has a CUDA driver, which TVM has loaded"
    for name in ("libcuda.so.1", "libcudart.so.13"):
        driver = ctypes.CDLL(str(home() / name), mode=ctypes.RTLD_GLOBAL)
    driver.lockstep_configure.argtypes = [ctypes.c_int, ctypes.c_size_t]
    driver.lockstep_memory_used.restype = ctypes.c_size_t
    ctypes.CDLL(str(Path(tvm.__file__).parent / "lib/libtvm_runtime_cuda.so"))
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_text, override=True)
    return driver


_changes: list[tuple[str, str, int | None]] = []


def compile_text(text: str) -> bytes:
    """Compile what TVM wrote, with the changes that :class:`changed` asks for."""
    for old, new, which in _changes:
        parts = text.split(old)
        places = range(len(parts) - 1) if which is None else [which]
        assert len(parts) > max(places, default=0) + 1, f"the kernel's text has {old!r} {len(parts) - 1} times"
        text = parts[0] + "".join((new if i in places else old) + part for i, part in enumerate(parts[1:]))
    return compile_kernels(text)


class changed:
    """Replace a part of the text of all kernels that are built within: to see that a test fails then.

    Args:
        which: replace only this occurrence, counted from 0.
    """

    def __init__(self, old: str, new: str, which: int | None = None) -> None:
        self.change = old, new, which

    def __enter__(self) -> None:
        _changes.append(self.change)

    def __exit__(self, *_: object) -> None:
        _changes.remove(self.change)


def start(capability: int = 90, memory: int = 1 << 32) -> ctypes.CDLL:
    """Begin to run CUDA on the CPU; where that cannot be, skip the test, and in CI let it fail.

    Args:
        capability: 10 times the compute capability of the device that is reported.
        memory: the device's bytes.
    """
    driver = _driver()
    if isinstance(driver, str):
        skip_or_fail(driver)
    driver.lockstep_configure(capability, memory)
    return driver


def stand_in_for_nvcc(patch: pytest.MonkeyPatch, report: str = "") -> None:
    """Let the toolchain compile CUDA text for the fake driver; ``report`` is what ptxas would say."""
    start()
    patch.setattr(toolchain, "find_nvcc", lambda: Path("nvcc"))
    patch.setattr(toolchain, "compile_fatbin", lambda text, _archs: (compile_text(text), report))


def cuda_text(executable: Any) -> str:
    """Return the CUDA text of a compiled module."""
    modules, found = [getattr(executable, "mod", executable)], []
    while modules:
        module = modules.pop()
        modules += list(module.imports)
        if module.kind == "cuda":
            found.append(module.inspect_source())
    return "\n".join(found)


class Kernel:
    """A kernel that takes and returns host arrays, and is run in both orders of its threads."""

    def __init__(self, func: tvm.tirx.PrimFunc) -> None:
        self.driver = start()
        module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
        self.executable = tvm.compile(module, target=target(), tir_pipeline=PIPELINE)
        self.text = cuda_text(self.executable)

    def __call__(self, *operands: Any) -> list[np.ndarray]:
        """Run it on copies of the operands, arrays or tensors, None being left out; return all as they are then.

        Threads and blocks begin in ascending order, and on fresh copies in descending order: results that differ are
        an AssertionError.
        """
        given = [as_array(x) for x in operands if x is not None]
        results = []
        for is_descending in (False, True):
            self.driver.lockstep_set_order(is_descending)
            held = [tvm.runtime.tensor(x, device=tvm.cuda(0)) for x in given]
            self.executable["kernel"](*held)
            results.append([x.numpy() for x in held])
        self.driver.lockstep_set_order(False)
        for i, (one, other) in enumerate(zip(*results, strict=True)):
            assert one.tobytes() == other.tobytes(), f"operand {i} depends on the order of the threads"
        return results[0]


def as_array(x: Any) -> np.ndarray:
    """Return a tensor as an array; bfloat16 as uint16."""
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous()
        return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return np.ascontiguousarray(x)


def build(func: tvm.tirx.PrimFunc) -> Kernel:
    """Compile one kernel, or skip the test where that cannot be."""
    return Kernel(func)


def run(kernel: Callable[..., list[np.ndarray]], *operands: Any, out: Sequence[int]) -> torch.Tensor:
    """Call a kernel with the output last, float32 of the given shape; NaN shows elements that were not written."""
    return torch.from_numpy(kernel(*operands, np.full(tuple(out), np.nan, np.float32))[-1])
