"""Call CUDA's run-time library: which GPU there is, its memory, its stream, and recorded graphs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compressor_runtime.errors import BundleError

CUDART = "libcudart.so.13"
TO_DEVICE, FROM_DEVICE, ON_DEVICE = 1, 2, 3  # kinds of copies
_MAJOR, _MINOR = 75, 76  # attributes of a device
_NON_BLOCKING, _RELAXED = 1, 2
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100


def serves(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Tell whether a GPU of this compute capability runs code for some of ``archs``.

    Machine code (``sm_90``) runs on the same major version from its minor one on, PTX (``compute_100``) on all later.
    """
    for arch in archs:
        kind, _, number = arch.partition("_")
        own = divmod(int(number), 10)
        if own <= capability and (kind == "compute" or own[0] == capability[0]):
            return True
    return False


def find_cudart() -> str | None:
    """Return what to load CUDA's run-time library by: its name, or a path into the package nvidia-cuda-runtime."""
    try:
        ctypes.CDLL(CUDART)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
        homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        places = [*(folder / "cu13" / "lib" for folder in folders), *(home / "lib64" for home in homes)]
        return next((str(place / CUDART) for place in places if (place / CUDART).is_file()), None)
    return CUDART


@cache
def capability_here() -> tuple[int, int] | None:
    """Return the compute capability of GPU 0; None where there is no GPU, no driver, or no CUDA run-time library."""
    try:
        return Driver(0).capability
    except BundleError:
        return None


def why_not_here(archs: Sequence[str]) -> str:
    """Return why GPU 0 does not run code for ``archs``, without loading any; an empty text where it does."""
    capability = capability_here()
    if capability is None:
        return f"the kernels run on NVIDIA GPUs ({', '.join(archs)}), and there is none here"
    number = ".".join(map(str, capability))
    served = serves(archs, capability)
    return "" if served else f"the kernels are for {', '.join(archs)}, and the GPU has compute capability {number}"


class Driver:
    """CUDA's run-time library, for one GPU.

    Attributes:
        index: of the GPU.
        capability: its compute capability.

    Raises:
        BundleError: there is no driver, no such GPU, a driver that is too old, or no run-time library.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        try:
            ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise BundleError(
                "no NVIDIA driver (libcuda.so.1) on this machine, and the kernels run on an NVIDIA GPU; install the "
                "driver, or compress again with `target: x86`"
            ) from error
        found = find_cudart()
        if found is None:
            raise BundleError(f"{CUDART} is missing; `pip install 'nvidia-cuda-runtime==13.0.*'`")
        self._library = ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        count = ctypes.c_int()
        status = self._library.cudaGetDeviceCount(ctypes.byref(count))
        if status == _INSUFFICIENT_DRIVER:
            raise BundleError("the NVIDIA driver is older than CUDA 13.0, which the kernels need; update it (580 on)")
        if status == _NO_DEVICE or (not status and index >= count.value):
            gpus = "no GPU" if not count.value else f"{count.value} of them, numbered from 0"
            raise BundleError(f"cuda:{index}: the driver finds {gpus}; see nvidia-smi, and CUDA_VISIBLE_DEVICES")
        self._check(status, "counting GPUs")
        self.capability = (self._attribute(_MAJOR), self._attribute(_MINOR))

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cudaDeviceGetAttribute", ctypes.byref(value), which, self.index)
        return value.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            BundleError: the status is an error.
        """
        self._check(getattr(self._library, name)(*arguments), name)

    def _check(self, status: int, what: str) -> None:
        if status:
            text = self._library.cudaGetErrorString(status) or b"unknown"
            raise BundleError(f"cuda:{self.index}: {what}: {text.decode(errors='replace')} (CUDA's error {status})")

    def use(self) -> None:
        """Let this thread's calls be for this GPU."""
        self.call("cudaSetDevice", self.index)

    def memory(self) -> tuple[int, int]:
        """Return the free bytes of the GPU's memory, and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.use()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def stream(self) -> int:
        """Make a stream, which no other work waits for, and return its address."""
        made = ctypes.c_void_p()
        self.use()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(made), _NON_BLOCKING)
        return made.value or 0

    def copy(self, to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        """Copy bytes between addresses, in the stream's order."""
        pointers = ctypes.c_void_p(to), ctypes.c_void_p(source)
        self.call("cudaMemcpyAsync", *pointers, ctypes.c_size_t(size_bytes), kind, ctypes.c_void_p(stream))

    def clear(self, at: int, size_bytes: int, stream: int) -> None:
        """Fill bytes with zeros, in the stream's order."""
        self.call("cudaMemsetAsync", ctypes.c_void_p(at), 0, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        """Wait for what the stream has been given; raises what went wrong there."""
        self.call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def pinned(self, size_bytes: int) -> int:
        """Return the address of host memory that copies need not go through a buffer for."""
        made = ctypes.c_void_p()
        self.use()
        self.call("cudaMallocHost", ctypes.byref(made), ctypes.c_size_t(size_bytes))
        return made.value or 0

    def free_pinned(self, at: int) -> None:
        """Free what :meth:`pinned` returned."""
        self.call("cudaFreeHost", ctypes.c_void_p(at))

    def begin_capture(self, stream: int) -> None:
        """Let the stream keep what it is given, in place of doing it."""
        self.call("cudaStreamBeginCapture", ctypes.c_void_p(stream), _RELAXED)

    def end_capture(self, stream: int) -> int:
        """Return what the stream has kept, ready to be launched."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            self.call("cudaGraphInstantiate", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        finally:
            self.call("cudaGraphDestroy", graph)
        return ready.value or 0

    def launch(self, graph: int, stream: int) -> None:
        """Do what was kept once more."""
        self.call("cudaGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def free_graph(self, graph: int) -> None:
        """Free what :meth:`end_capture` returned."""
        self.call("cudaGraphExecDestroy", ctypes.c_void_p(graph))
