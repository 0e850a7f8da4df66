"""Record the step of one token as a CUDA graph, and launch it again for each token.

A graph keeps addresses.  What it computes in is its own as long as it lives: inputs and caches are a session's, the
storages of intermediate results are held, and the workspaces within kernels, which TVM keeps for each thread, belong
to a thread that only this graph was recorded on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.device.driver import FROM_DEVICE, TO_DEVICE
from compressor_runtime.device.gpu import Gpu
from compressor_runtime.errors import BundleError
from compressor_runtime.vm import Vm, tvm_ffi

_ALLOCATE = "vm.builtin.alloc_storage"


class Recorder:
    """A second virtual machine over a bundle's kernels, whose storages outlive its calls."""

    def __init__(self, vm: Vm, gpu: Gpu, parameters: Any) -> None:
        self.vm, self.gpu, self.parameters = vm, gpu, parameters
        self._held: list[Any] = []
        self._again: Iterator[Any] | None = None  # storages of the call before, for one that asks for the same
        allocate = tvm_ffi.get_global_func(_ALLOCATE)

        def allocate_and_hold(*arguments: Any) -> Any:
            if self._again is not None:
                return next(self._again)
            self._held.append(allocate(*arguments))
            return self._held[-1]

        # A machine looks its functions up when it is made.
        tvm_ffi.register_global_func(_ALLOCATE, allocate_and_hold, override=True)
        try:
            self.main = vm.machine()["main"]
        finally:
            tvm_ffi.register_global_func(_ALLOCATE, allocate, override=True)

    def call(self, *arguments: Any) -> tuple[Any, list[Any]]:
        """Call the library's ``main``; return its result, and the storages that it computed in."""
        self._held = []
        return self.main(*arguments, self.parameters), self._held

    def call_again(self, storages: Sequence[Any], *arguments: Any) -> Any:
        """Call it once more, in the storages of a call with arguments of the same shapes."""
        self._again = iter(storages)
        try:
            return self.main(*arguments, self.parameters)
        finally:
            self._again = None

    def record(self, ids: NDArray[np.int64], position: int, kept: Sequence[Any]) -> RecordedStep:
        """Record the step that appends ``ids`` [B, 1] at ``position`` to the given caches; it is not done yet.

        Recording writes these tokens' keys and values, as the step itself will.

        Raises:
            BundleError: the step does what cannot be recorded, or the GPU has no memory left.
        """
        made: RecordedStep = self.vm.call(RecordedStep, self, ids, position, kept)
        return made


class RecordedStep:
    """A step of one token that was recorded; it writes the caches that it was recorded on."""

    def __init__(self, recorder: Recorder, ids: NDArray[np.int64], position: int, kept: Sequence[Any]) -> None:
        self._recorder, self._kept, gpu, batch = recorder, tuple(kept), recorder.gpu, len(ids)
        self._graph = self._pinned = 0
        self._thread = ThreadPoolExecutor(1, "compressor-graph")
        self._inputs = [gpu.put(given) for given in (ids, np.array([position]), np.array([0]))]
        self._thread.submit(self._record).result()
        self._output_shape = tuple(int(n) for n in self._output.shape)
        output_bytes = 4 * int(np.prod(self._output_shape))
        self._pinned = gpu.driver.pinned(8 * (batch + 1) + output_bytes)
        words = np.ctypeslib.as_array((ctypes.c_int64 * (batch + 1)).from_address(self._pinned))
        self._ids, self._position = words[:batch], words[batch:]
        self._result = self._pinned + words.nbytes
        floats = (ctypes.c_float * (output_bytes // 4)).from_address(self._result)
        self._logits: NDArray[np.float32] = np.ctypeslib.as_array(floats).reshape(self._output_shape)

    def _record(self) -> None:
        recorder, gpu = self._recorder, self._recorder.gpu
        arguments = (*self._inputs, *self._kept)
        with gpu.running():
            _, self._storages = recorder.call(*arguments)  # nothing may be allocated while the stream captures
            gpu.driver.wait(gpu.stream)
            gpu.driver.begin_capture(gpu.stream)
            failed: Exception | None = None
            try:
                self._output = recorder.call_again(self._storages, *arguments)
            except (RuntimeError, TypeError, ValueError) as error:
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
        for tensor, given in zip(self._inputs, (self._ids, self._position), strict=False):
            driver.copy(tensor.data_ptr(), given.ctypes.data, given.nbytes, TO_DEVICE, gpu.stream)
        driver.launch(self._graph, gpu.stream)
        driver.copy(self._result, self._output.data_ptr(), self._logits.nbytes, FROM_DEVICE, gpu.stream)
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


Record = Callable[[NDArray[np.int64], int, Sequence[Any]], RecordedStep]
