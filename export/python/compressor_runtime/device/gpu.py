"""Keep tensors in the memory of an NVIDIA GPU, and call kernels in the order of one stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.device.driver import FROM_DEVICE, ON_DEVICE, TO_DEVICE, Driver
from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.vm import tvm_ffi

_CUDA, _CPU, _POOLED = 2, 1, 2


class Gpu:
    """An NVIDIA GPU.

    Attributes:
        name: as :func:`compressor_runtime.load` takes it.
        driver: CUDA's run-time library.
        stream: of all work, so that no call waits for the one before but by the order of the stream.
        vm_arguments: of the virtual machine: this GPU, and the CPU for sizes, each with its pooled allocator.
        divides: batches are not computed in parts.
        uses_threads: kernels do not run on TVM's threads.
    """

    divides = uses_threads = False

    def __init__(self, driver: Driver) -> None:
        self.driver, self.name = driver, f"cuda:{driver.index}"
        self.vm_arguments: Sequence[int] = (_CUDA, driver.index, _POOLED, _CPU, 0, _POOLED)
        self.stream = driver.stream()
        self._device = tvm_ffi.device("cuda", driver.index)
        self._allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")

    def put(self, array: NDArray[Any]) -> Any:
        """Copy an array to the GPU."""
        source = np.ascontiguousarray(array)
        made = self.empty(source.shape, source.dtype)
        self.driver.copy(made.data_ptr(), source.ctypes.data, source.nbytes, TO_DEVICE, self.stream)
        return made

    def get(self, tensor: Any) -> NDArray[Any]:
        """Copy a tensor from the GPU, when all work before it is done."""
        shape = tuple(int(n) for n in tensor.shape)
        found = np.empty(shape, np.dtype(str(tensor.dtype)))
        self.driver.use()
        self.driver.copy(found.ctypes.data, tensor.data_ptr(), found.nbytes, FROM_DEVICE, self.stream)
        self.driver.wait(self.stream)
        return found

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return a tensor with whatever was in its memory.

        Raises:
            RequestError: the GPU has no room for it.
        """
        self.driver.use()
        try:
            sizes = tvm_ffi.Shape(tuple(int(n) for n in shape))
            return self._allocate(sizes, tvm_ffi.dtype(dtype.name), self._device, None)
        except RuntimeError as error:
            self.check_room(prod(shape) * dtype.itemsize, f"a tensor {list(shape)}")
            raise BundleError(f"{self.name}: cannot allocate {prod(shape) * dtype.itemsize} bytes: {error}") from error

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return a tensor of zeros."""
        made = self.empty(shape, dtype)
        self.driver.clear(made.data_ptr(), prod(shape) * dtype.itemsize, self.stream)
        return made

    def grown(self, cache: Any, shape: Sequence[int], dtype: np.dtype[Any], stored: int) -> Any:
        """Return a larger cache, [B, H, T, D], with the first ``stored`` rows of each head of ``cache``."""
        larger = self.zeros(shape, dtype)
        batch, heads, rows, width = shape
        row_bytes = width * dtype.itemsize
        before, after = int(cache.shape[2]) * row_bytes, rows * row_bytes
        for head in range(batch * heads if stored else 0):
            to, source = larger.data_ptr() + head * after, cache.data_ptr() + head * before
            self.driver.copy(to, source, stored * row_bytes, ON_DEVICE, self.stream)
        self.driver.wait(self.stream)  # the old one may be freed now
        return larger

    def check_room(self, size_bytes: int, what: str) -> None:
        """Raise a RequestError where the GPU's free memory cannot hold what is asked for."""
        free, total = self.driver.memory()
        if size_bytes > free:
            raise RequestError(
                f"{self.name}: {what} take {size_bytes} bytes, and {free} of the GPU's {total} are free; give fewer or "
                "shorter ones, or end what else uses the GPU"
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let this thread call kernels on the stream within the block.

        Raises:
            BundleError: the GPU's memory does not hold what they compute in.
        """
        self.driver.use()
        with tvm_ffi.use_raw_stream(self._device, self.stream):
            try:
                yield
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                free, total = self.driver.memory()
                raise BundleError(
                    f"{self.name}: the GPU's memory does not hold what is computed in between: {free} of {total} bytes "
                    "are free; give fewer tokens at once, or end what else uses the GPU"
                ) from error

    def read_bandwidth(self, _vm: Any, size_bytes: int, repeats: int) -> float:
        """Return the bytes per second, read and written, of copies within the GPU's memory; the best of the repeats."""
        source, to = (self.zeros((size_bytes // 4,), np.dtype(np.int32)) for _ in range(2))
        seconds = []
        for _ in range(repeats):
            self.driver.wait(self.stream)
            begin = time.perf_counter()
            for _ in range(4):
                self.driver.copy(to.data_ptr(), source.data_ptr(), size_bytes // 4 * 4, ON_DEVICE, self.stream)
            self.driver.wait(self.stream)
            seconds.append(time.perf_counter() - begin)
        return 4 * 2 * size_bytes / min(seconds)
