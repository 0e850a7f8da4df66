"""Run kernels for ARM in this test session: one process of qemu a level loads them and is called by pipes.

A process emulates a CPU that has just its level's instructions, so that a kernel with others ends in SIGILL.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from missing import skip_or_fail

from compressor.codegen.isa import Isa
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets.arm import EMULATED

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


def target(isa: Isa) -> tvm.target.Target:
    """Return TVM's target of a level."""
    fields = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": isa.mcpu, "mattr": list(isa.mattr)}
    return tvm.target.Target(fields)


def compiled(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    """Compile one kernel without executing it."""
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=target(isa), tir_pipeline=PIPELINE)


def build(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    """Compile and load one kernel; the result is called with TVM's tensors, as one of this machine."""
    return emulator(EMULATED[isa.name]).load(compiled(func, isa).mod)


def _tool(name: str) -> str:
    found = shutil.which(name)
    return found if found is not None else skip_or_fail(f"{name} is not on PATH")


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="emulated-arm-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _runner() -> Path:
    made, source = _folder() / "runner", Path(__file__).with_suffix(".cc")
    include = Path(tvm_ffi.__file__).parent / "include"
    compiler = [_tool("aarch64-linux-gnu-g++"), "-std=c++17", "-O1", f"-I{include}", "-rdynamic"]
    subprocess.run([*compiler, str(source), "-o", str(made), "-ldl", "-lm"], check=True)
    return made


@functools.cache
def emulator(cpu: str) -> _Emulator:
    """Return the process that emulates a CPU."""
    return _Emulator(cpu)


class _Emulator:
    """A process of qemu, until one of its kernels kills it."""

    def __init__(self, cpu: str) -> None:
        self.cpu, self.count = cpu, 0
        self._start()
        atexit.register(lambda: self.process.kill())

    def _start(self) -> None:
        command = [_tool("qemu-aarch64-static"), "-cpu", self.cpu, "-L", "/usr/aarch64-linux-gnu", str(_runner())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def load(self, module: Any) -> Any:
        """Link a module and load it; return what calls it."""
        self.count += 1
        path = _folder() / f"{self.cpu}-{self.count}"
        module.write_to_file(f"{path}.o", "o")
        subprocess.run([_tool("ld.lld"), "-shared", "-o", f"{path}.so", f"{path}.o"], check=True)
        Path(f"{path}.o").unlink()

        def call(*tensors: Any) -> None:
            self._ask(f"load {path}.so\n".encode())
            arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
            heads = [
                " ".join(map(str, (_CODES[x.dtype.kind], 8 * x.itemsize, x.ndim, *x.shape))).encode() for x in arrays
            ]
            parts = [head + b"\n" + x.tobytes() for head, x in zip(heads, arrays, strict=True)]
            self._ask(b"".join([b"call %d\n" % len(arrays), *parts]))
            for tensor, x in zip(tensors, arrays, strict=True):
                assert self.process.stdout is not None
                tensor.copyfrom(np.frombuffer(self.process.stdout.read(x.nbytes), x.dtype).reshape(x.shape))

        return call

    def _ask(self, message: bytes) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(message)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died, and the answer says so
        answer = self.process.stdout.readline().decode().strip()
        if answer != "ok":
            code = self.process.poll() if answer else self.process.wait()
            if code is not None:
                self._start()
            raise RuntimeError(answer or f"the kernel ended qemu ({self.cpu}) with {code}")
