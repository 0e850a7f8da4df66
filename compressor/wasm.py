"""Runs WebAssembly programs from Python, through wasmtime: for checks, not for speed.

The browser's run-time is ``export/web/runner.js``; this one reads the same program and module, so that kernels are
executed and measured where a bundle is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compressor.codegen.web.kernel import evaluate
from compressor.errors import ToolchainError

_PAGE_BYTES = 1 << 16
_ALIGNMENT_BYTES = 64


def is_available() -> bool:
    """Whether wasmtime is installed."""
    try:
        import wasmtime  # noqa: F401
    except ImportError:
        return False
    return True


class WasmProgram:
    """A program with its module and parameters in one memory; buffers are addresses in it.

    Args:
        content: see :class:`compressor.codegen.web.lower.WebProgram`.
        module: what :func:`compressor.codegen.web.lower.compile_wasm` linked.
        tensors: parameters and constants by name.
    """

    def __init__(self, content: Mapping[str, Any], module: bytes, tensors: Mapping[str, NDArray[Any]]) -> None:
        try:
            import wasmtime
        except ImportError as error:
            raise ToolchainError(
                "running WebAssembly here needs the package wasmtime: pip install 'compressor[webgpu]'"
            ) from error
        self.content = content
        self._store = wasmtime.Store()
        kinds = wasmtime.ValType
        self._memory = wasmtime.Memory(self._store, wasmtime.MemoryType(wasmtime.Limits(64, None)))
        word, wide = kinds.i32(), kinds.i64()
        linker = wasmtime.Linker(self._store.engine)
        linker.define(self._store, "env", "memory", self._memory)
        provided: dict[str, tuple[list[Any], list[Any], Any]] = {
            "TVMBackendAllocWorkspace": ([word, word, wide, word, word], [word], self._allot),
            "TVMBackendFreeWorkspace": ([word, word, word], [word], self._free),
            "TVMFFIEnvModRegisterSystemLibSymbol": ([word, word], [word], lambda *_: 0),
        }
        for name, (given, returned, function) in provided.items():
            linker.define_func("env", name, wasmtime.FuncType(given, returned), function)
        instance = linker.instantiate(self._store, wasmtime.Module(self._store.engine, module))
        self._functions = cast(Any, instance.exports(self._store))
        self._top = int(self._functions["__heap_base"].value(self._store))
        self._own: list[tuple[int, int]] = []  # what the running kernel has allotted: end before it, address
        self._tensors = {name: self.upload(array) for name, array in tensors.items()}
        self._scratch: dict[int, tuple[int, int]] = {}  # number -> address and bytes

    def empty(self, size_bytes: int) -> int:
        """A buffer of zeros."""
        address = -(-self._top // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._top = address + max(4, size_bytes)
        missing = self._top - self._memory.data_len(self._store)
        if missing > 0:
            self._memory.grow(self._store, -(-missing // _PAGE_BYTES))
        return address

    def upload(self, array: NDArray[Any]) -> int:
        """A buffer with these bytes."""
        content = np.ascontiguousarray(array).tobytes()
        address = self.empty(len(content))
        ctypes.memmove(self._at(address), content, len(content))
        return address

    def read(self, address: int, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        """An array of what lies there."""
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self._at(address), size_bytes), dtype).reshape(shape)

    def run(self, inputs: Mapping[str, int], sizes: Mapping[str, int]) -> int:
        """Run all steps on buffers by the inputs' names; returns the output's buffer, which the next run reuses."""
        for number, size in enumerate(self.content["scratch"]):
            wanted = evaluate(size, sizes)
            if self._scratch.get(number, (0, -1))[1] < wanted:
                self._scratch[number] = self.empty(wanted), wanted
        begin = self._top
        for step in self.content["steps"]:
            numbers = [evaluate(size, sizes) for size in step["sizes"]]
            addresses = [self._buffer(reference, inputs) for reference in step["buffers"]]
            self.call(step["kernels"][0], addresses, numbers)
        assert self._top == begin
        return self._buffer(self.content["output"], inputs)

    def call(self, name: str, addresses: Sequence[int], numbers: Sequence[int]) -> None:
        """Run one kernel."""
        begin = self._top
        failed = self._functions[name](self._store, *addresses, *numbers)
        assert not failed, f"{name} found no memory"
        self._top, self._own = begin, []

    def _at(self, address: int) -> int:
        pointer = ctypes.cast(self._memory.data_ptr(self._store), ctypes.c_void_p).value
        assert pointer is not None
        return pointer + address

    def _allot(self, _type: int, _device: int, size_bytes: int, _code: int, _bits: int) -> int:
        before, address = self._top, self.empty(size_bytes)
        self._own.append((before, address))
        return address

    def _free(self, _type: int, _device: int, address: int) -> int:
        if self._own and self._own[-1][1] == address:  # others are freed when the kernel ends
            self._top, _ = self._own.pop()
        return 0

    def _buffer(self, reference: str, inputs: Mapping[str, int]) -> int:
        kind, _, name = reference.partition(":")
        if kind == "scratch":
            return self._scratch[int(name)][0]
        return inputs[name] if kind == "input" else self._tensors[name]
