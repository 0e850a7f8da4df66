"""Run WebAssembly programs from Python, through wasmtime: for checks, not for speed.

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
_TASKS = 3
"""Number of tasks of a parallel loop."""


def is_available() -> bool:
    """Return whether wasmtime is installed."""
    try:
        import wasmtime  # noqa: F401
    except ImportError:
        return False
    return True


class WasmProgram:
    """A program with its module and parameters in one memory; buffers are addresses in it.

    Args:
        content: see :class:`compressor.codegen.web.lower.WebProgram`.
        module: the module that :func:`compressor.codegen.web.lower.compile_wasm` linked.
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
        self._memory = wasmtime.Memory(self._store, wasmtime.MemoryType(wasmtime.Limits(64, 1 << 16)))
        word, wide = kinds.i32(), kinds.i64()
        linker = wasmtime.Linker(self._store.engine)
        linker.define(self._store, "env", "memory", self._memory)
        provided: dict[str, tuple[list[Any], list[Any], Any]] = {
            "TVMBackendAllocWorkspace": ([word, word, wide, word, word], [word], self._allot),
            "TVMBackendFreeWorkspace": ([word, word, word], [word], self._free),
            "TVMBackendParallelLaunch": ([word, word, word], [word], self._launch),
            "TVMFFIEnvModRegisterSystemLibSymbol": ([word, word], [word], lambda *_: 0),
        }
        for name, (given, returned, function) in provided.items():
            linker.define_func("env", name, wasmtime.FuncType(given, returned), function)
        instance = linker.instantiate(self._store, wasmtime.Module(self._store.engine, module))
        self._functions = cast(Any, instance.exports(self._store))
        first = int(self._functions["__heap_base"].value(self._store))
        self._holes = [[-(-first // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, 1 << 32]]  # beginnings and ends
        self._taken: dict[int, int] = {}  # address -> bytes
        self._tasks = self.upload(np.array([0, _TASKS], np.int32))
        self._tensors = {name: self.upload(array) for name, array in tensors.items()}
        self._scratch: dict[str, dict[int, tuple[int, int]]] = {}  # of an entry: number -> address and bytes

    def empty(self, size_bytes: int) -> int:
        """Allocate a buffer of zeros and return its address."""
        address = self._take(size_bytes)
        ctypes.memset(self._at(address), 0, size_bytes)
        return address

    def free(self, address: int) -> None:
        """Free a buffer."""
        end = address + self._taken.pop(address)
        i = next(i for i, hole in enumerate(self._holes) if hole[0] >= end)
        self._holes.insert(i, [address, end])
        for j in (i, i - 1):  # merge adjacent holes
            if 0 <= j < len(self._holes) - 1 and self._holes[j][1] == self._holes[j + 1][0]:
                self._holes[j : j + 2] = [[self._holes[j][0], self._holes[j + 1][1]]]

    def _take(self, size_bytes: int) -> int:
        """Allocate ``size_bytes``, aligned, in the first hole with room, and return the address."""
        size = -(-max(4, size_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        hole = next((hole for hole in self._holes if hole[0] + size <= hole[1]), None)
        if hole is None:
            raise ToolchainError(f"WebAssembly has no {size} bytes left of its 4 GiB; the model is too large for it")
        address = hole[0]
        hole[0] += size
        self._taken[address] = size
        missing = address + size - self._memory.data_len(self._store)
        if missing > 0:
            self._memory.grow(self._store, -(-missing // _PAGE_BYTES))
        return address

    def upload(self, array: NDArray[Any]) -> int:
        """Copy an array into a new buffer and return its address."""
        content = np.ascontiguousarray(array).tobytes()
        address = self._take(len(content))
        ctypes.memmove(self._at(address), content, len(content))
        return address

    def read(self, address: int, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        """Return a copy of the array at an address."""
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self._at(address), size_bytes), dtype).reshape(shape).copy()

    def run(self, inputs: Mapping[str, int], sizes: Mapping[str, int], entry: str = "main") -> int:
        """Run all steps of an entry on buffers by the inputs' names and return the output's buffer, which the next run
        of it reuses.
        """
        program = self.content if entry == "main" else self.content[entry]
        return self._run(entry, program, [program["output"]], inputs, sizes)[0]

    def encode(self, inputs: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
        """Run the steps of ``encode``, and return copies of its outputs' buffers, by name."""
        outputs = self.content["encode"]["outputs"]
        found = self._run("encode", self.content["encode"], [out["buffer"] for out in outputs], inputs, sizes)
        shapes = [[evaluate(n, sizes) for n in out["shape"]] for out in outputs]
        arrays = [self.read(address, "float32", shape) for address, shape in zip(found, shapes, strict=True)]
        return {out["name"]: self.upload(array) for out, array in zip(outputs, arrays, strict=True)}

    def _run(
        self,
        name: str,
        entry: Mapping[str, Any],
        outputs: Sequence[str],
        inputs: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> list[int]:
        """Run the steps of an entry, and return the addresses of its outputs."""
        scratch = self._scratch.setdefault(name, {})
        for number, size in enumerate(entry["scratch"]):
            wanted = evaluate(size, sizes)
            if scratch.get(number, (0, -1))[1] < wanted:
                if number in scratch:
                    self.free(scratch[number][0])
                scratch[number] = self._take(wanted), wanted
        for step in entry["steps"]:
            numbers = [evaluate(size, sizes) for size in step["sizes"]]
            addresses = [self._buffer(reference, inputs, scratch) for reference in step["buffers"]]
            self.call(step["kernels"][0], addresses, numbers)
        return [self._buffer(output, inputs, scratch) for output in outputs]

    def call(self, name: str, addresses: Sequence[int], numbers: Sequence[int]) -> None:
        """Run one kernel."""
        if self._functions[name](self._store, *map(_signed, addresses), *numbers):
            raise ToolchainError(f"WebAssembly: {name} found no memory")

    def _at(self, address: int) -> int:
        pointer = ctypes.cast(self._memory.data_ptr(self._store), ctypes.c_void_p).value
        assert pointer is not None
        return pointer + address

    def _allot(self, _type: int, _device: int, size_bytes: int, _code: int, _bits: int) -> int:
        return _signed(self._take(size_bytes))

    def _free(self, _type: int, _device: int, address: int) -> int:
        self.free(address % (1 << 32))
        return 0

    def _launch(self, function: int, data: int, _tasks: int) -> int:
        """Run all tasks of a parallel loop, the last first, so that wrong dependences on their order show."""
        task = self._functions["__indirect_function_table"].get(self._store, function)
        return int(any([task(self._store, i, self._tasks, data) for i in reversed(range(_TASKS))]))

    def _buffer(self, reference: str, inputs: Mapping[str, int], scratch: Mapping[int, tuple[int, int]]) -> int:
        kind, _, name = reference.partition(":")
        if kind == "scratch":
            return scratch[int(name)][0]
        return inputs[name] if kind == "input" else self._tensors[name]


def _signed(address: int) -> int:
    """Return an address as the signed 32-bit integer that functions take."""
    return address - (1 << 32) if address >> 31 else address
