"""Record the step of one token as a CUDA graph, and launch it again for each token.

A graph keeps addresses.  What it computes in is its own as long as it lives: inputs and caches are a session's, the
storages of intermediate results are held, and the workspaces within kernels, which TVM keeps for each thread, belong
to a thread that only this graph was recorded on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.device.driver import FROM_DEVICE, TO_DEVICE
from compressor_runtime.device.gpu import Gpu
from compressor_runtime.errors import BundleError
from compressor_runtime.vm import Vm, tvm_ffi

_ALLOCATE = "vm.builtin.alloc_storage"
_APART_BYTES = 256  # between inputs in one buffer: kernels take aligned addresses


class Recorder:
    """A second virtual machine over a bundle's kernels, whose storages can be held."""

    def __init__(self, vm: Vm, gpu: Gpu, parameters: Any) -> None:
        self.vm, self.gpu, self.parameters = vm, gpu, parameters
        self.held: list[Any] | None = None
        allocate = tvm_ffi.get_global_func(_ALLOCATE)

        def allocate_and_hold(*arguments: Any) -> Any:
            storage = allocate(*arguments)
            if self.held is not None:
                self.held.append(storage)
            return storage

        # A machine looks its functions up when it is made.
        tvm_ffi.register_global_func(_ALLOCATE, allocate_and_hold, override=True)
        try:
            self.main = vm.machine()["main"]
        finally:
            tvm_ffi.register_global_func(_ALLOCATE, allocate, override=True)

    @contextmanager
    def holding(self) -> Iterator[list[Any]]:
        """Collect the storages that calls within the block compute in."""
        found: list[Any] = []
        self.held = found
        try:
            yield found
        finally:
            self.held = None

    def record(self, batch: int, kept: Sequence[Any]) -> RecordedStep:
        """Record a step of one token for each of ``batch`` sequences, on the given caches.

        Raises:
            BundleError: the step does what cannot be recorded, or the GPU has no memory left.
        """
        made: RecordedStep = self.vm.call(RecordedStep, self, batch, kept)
        return made


class RecordedStep:
    """A step of one token that was recorded; it writes the caches that it was recorded on."""

    def __init__(self, recorder: Recorder, batch: int, kept: Sequence[Any]) -> None:
        self._recorder, self._kept, gpu = recorder, tuple(kept), recorder.gpu
        self._graph = self._pinned = 0
        places = [_padded(8 * batch), _padded(8), _padded(8)]
        self._input_bytes = sum(places)
        buffer = gpu.zeros((self._input_bytes // 8,), np.dtype(np.int64))
        view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
        starts, shapes = (0, places[0], places[0] + places[1]), ((batch, 1), (1,), (1,))
        self._views = [
            view(buffer, tvm_ffi.Shape(shape), tvm_ffi.dtype("int64"), start)
            for shape, start in zip(shapes, starts, strict=True)
        ]
        self._buffer = buffer
        self._thread = ThreadPoolExecutor(1, "compressor-graph")
        self._thread.submit(self._record).result()
        self._output_shape = tuple(int(n) for n in self._output.shape)
        output_bytes = 4 * int(np.prod(self._output_shape))
        self._pinned = gpu.driver.pinned(self._input_bytes + output_bytes)
        words = (ctypes.c_int64 * (self._input_bytes // 8)).from_address(self._pinned)
        given = np.ctypeslib.as_array(words)
        given[:] = 0  # the index of the token whose logits are wanted, too
        self._ids, self._position = given[:batch], given[places[0] // 8 :][:1]
        floats = (ctypes.c_float * (output_bytes // 4)).from_address(self._pinned + self._input_bytes)
        self._logits: NDArray[np.float32] = np.ctypeslib.as_array(floats).reshape(self._output_shape)

    def _record(self) -> None:
        recorder, gpu = self._recorder, self._recorder.gpu
        arguments = (*self._views, *self._kept, recorder.parameters)
        with recorder.holding() as self._held, gpu.running():
            recorder.main(*arguments)  # so that memory is allocated, which it must not be while the stream captures
            gpu.driver.wait(gpu.stream)
            self._held.clear()
            gpu.driver.begin_capture(gpu.stream)
            failed: Exception | None = None
            try:
                self._output = recorder.main(*arguments)
            except RuntimeError as error:
                failed = error
            try:
                self._graph = gpu.driver.end_capture(gpu.stream)
            except BundleError as error:
                raise BundleError(f"{error}; the step of one token cannot be recorded ({failed})") from failed
        if failed is not None:
            raise BundleError(f"the step of one token cannot be recorded: {failed}") from failed

    def __call__(self, ids: NDArray[np.int64], position: int) -> NDArray[np.float32]:
        """Compute the logits float32 [B, 1, V] of the token behind ``ids`` [B, 1], which stand at ``position``."""
        found: NDArray[np.float32] = self._recorder.vm.call(self._launch, ids, position)
        return found

    def _launch(self, ids: NDArray[np.int64], position: int) -> NDArray[np.float32]:
        gpu, driver = self._recorder.gpu, self._recorder.gpu.driver
        self._ids[:], self._position[0] = ids[:, 0], position
        driver.use()
        driver.copy(self._buffer.data_ptr(), self._pinned, self._input_bytes, TO_DEVICE, gpu.stream)
        driver.launch(self._graph, gpu.stream)
        at = self._pinned + self._input_bytes
        driver.copy(at, self._output.data_ptr(), self._logits.nbytes, FROM_DEVICE, gpu.stream)
        driver.wait(gpu.stream)
        return self._logits.copy()

    def close(self) -> None:
        """Free what was recorded; it must not be called any more."""
        driver = self._recorder.gpu.driver
        driver.use()
        if self._graph:
            driver.free_graph(self._graph)
        if self._pinned:
            driver.free_pinned(self._pinned)
        self._graph = self._pinned = 0
        self._thread.shutdown(wait=False)

    def __del__(self) -> None:
        """Free what was recorded."""
        self.close()


Record = Callable[[int, Sequence[Any]], RecordedStep]


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _APART_BYTES) * _APART_BYTES
