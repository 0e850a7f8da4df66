"""Keep tensors in this machine's memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError
from compressor_runtime.tensors import aligned_zeros, to_tvm
from compressor_runtime.vm import Vm


class Host:
    """The CPU.

    Attributes:
        name: as :func:`compressor_runtime.load` takes it.
        vm_arguments: of the virtual machine: device, its number, pooled allocator.
        divides: a batch is computed in parts that fit the caches.
        uses_threads: kernels run on TVM's threads.
    """

    name = "cpu"
    vm_arguments: Sequence[int] = (1, 0, 2)
    divides = uses_threads = True

    def put(self, array: NDArray[Any]) -> Any:
        """Return an array as the kernels take it; it is not copied where it is aligned and contiguous."""
        return to_tvm(array)

    def get(self, tensor: Any) -> NDArray[Any]:
        """Return a result of the kernels as numpy, not copied."""
        return np.from_dlpack(tensor)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return a tensor of zeros."""
        return to_tvm(aligned_zeros(tuple(shape), dtype))

    def grown(self, cache: Any, shape: Sequence[int], dtype: np.dtype[Any], stored: int) -> Any:
        """Return a larger cache, [B, H, T, D], with the first ``stored`` rows of each head of ``cache``."""
        larger = aligned_zeros(tuple(shape), dtype)
        larger[:, :, :stored] = np.from_dlpack(cache)[:, :, :stored]
        return to_tvm(larger)

    def move_rows(self, cache: Any, entry: int, sources: Sequence[int], places: Sequence[int]) -> None:
        """Copy rows of one entry of a cache [B, H, T, D] to other places; all are read before any is written."""
        rows = np.from_dlpack(cache)
        rows[entry, :, list(places)] = rows[entry, :, list(sources)]

    def copy_rows(self, sources: Sequence[Any], caches: Sequence[Any], entry: int, count: int) -> None:
        """Copy the first rows of caches [1, H, T, D] to an entry of others [B, H, T, D]."""
        for source, cache in zip(sources, caches, strict=True):
            np.from_dlpack(cache)[entry, :, :count] = np.from_dlpack(source)[0, :, :count]

    def check_room(self, size_bytes: int, what: str) -> None:
        """Raise a RequestError where this machine's memory cannot hold what is asked for."""
        if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise RequestError(
                f"{what} take {size_bytes} bytes, more than this machine's memory; give fewer or shorter ones"
            )

    def read_bandwidth(self, vm: Vm, size_bytes: int, repeats: int) -> float:
        """Return the bytes per second at which threads read memory, in blocks of 16 KiB; the best of the repeats."""
        words = aligned_zeros((64, size_bytes >> 14, 4, 16), np.dtype(np.int32))
        words.fill(1)  # untouched pages would all be one page of zeros
        tensor, seconds = to_tvm(words), []
        for _ in range(repeats):
            begin = time.perf_counter()
            vm.call(vm.functions["read_bandwidth"], tensor)
            seconds.append(time.perf_counter() - begin)
        return words.nbytes / min(seconds)

    def running(self) -> AbstractContextManager[None]:
        """Return a context to call kernels in."""
        return contextlib.nullcontext()
