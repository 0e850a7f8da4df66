"""TVM's run-time library, its threads, and its virtual machine over the kernels of a bundle."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from compressor_runtime.check import sha256
from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.manifest import TVM_CUDA, TVM_RUNTIME, is_cuda, member

_HIDDEN = ("torch", "torch_c_dlpack_ext")


class _Hide(importlib.abc.MetaPathFinder):
    """Say that torch is not installed, to the thread that imports tvm_ffi, which would import it: a second and 190 MB.

    A process that uses both imports torch first; otherwise tvm_ffi takes torch's tensors like any other library's.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _HIDDEN and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is not needed here", name=fullname)
        return None


_hide = _Hide()
sys.meta_path.insert(0, _hide)
try:
    import tvm_ffi as tvm_ffi
finally:
    sys.meta_path.remove(_hide)

_SHARE_CORES = -3  # TVM's kSpecifyThreadShareAllCore: threads may run on all the given cores, none is pinned
_SPINS = "1000"
"""An idle worker of TVM's yields so often before it sleeps.  Its own 300,000 times take minutes where other processes
want the processor, and the end of a process waits for them; these are half a millisecond where none does."""
_configured = threading.local()  # .threads: how many this thread's pool of TVM workers was last set to
_machines: weakref.WeakSet[Vm] = weakref.WeakSet()


class Device(Protocol):
    """What a machine needs to know of where it computes.

    Attributes:
        vm_arguments: devices with their numbers and allocators, as TVM numbers them.
        uses_threads: kernels run on TVM's threads.
    """

    vm_arguments: Sequence[int]
    uses_threads: bool

    def running(self) -> AbstractContextManager[None]:
        """Return a context to call kernels in."""


class Vm:
    """TVM's virtual machine over one library of kernels, on one device.  Threads may share it: calls take turns.

    Attributes:
        functions: of the library, by name; the model's entry is ``main``.
    """

    def __init__(self, library: Path, threads: int, device: Device) -> None:
        self._threads, self._device = threads, device
        try:
            self._module: Any = tvm_ffi.load_module(str(library.resolve()))
            self.functions: Any = self.machine()
            self.main = self.functions["main"]
        except (RuntimeError, AttributeError) as error:
            raise BundleError(f"{library}: cannot be loaded: {error}") from error
        self.begin_again()
        _machines.add(self)

    def machine(self) -> Any:
        """Make a machine over the library, as functions by name; its constants go to the device."""
        made = self._module["vm_load_executable"]()
        with self._device.running():
            made["vm_initialization"](*self._device.vm_arguments)
        return made

    def begin_again(self) -> None:
        """Forget the threads of the process that this one was forked from."""
        self._turn = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the library on the threads of this machine, when no other call runs."""
        with self._turn, self._device.running():
            if not self._device.uses_threads:
                return function(*arguments)
            configured = self._executor is not None or getattr(_configured, "threads", None) == self._threads
            if not configured and not configure_threads(self._threads):
                # This thread's pool was made smaller, by somebody's earlier kernels, and cannot grow: use another.
                self._executor = ThreadPoolExecutor(1, "compressor", configure_threads, (self._threads,))
            executor = self._executor
            return function(*arguments) if executor is None else executor.submit(function, *arguments).result()


def _begin_again() -> None:
    for machine in _machines:
        machine.begin_again()
    if hasattr(_configured, "threads"):
        del _configured.threads
        _configured.is_lost = True


os.register_at_fork(after_in_child=_begin_again)


def configure_threads(threads: int) -> bool:
    """Give this thread's pool of TVM workers ``threads`` of them, on the cores we may use; False if it is too small.

    Raises:
        RequestError: the process was forked from one whose kernels had run on this thread: its workers are not here,
            and a second pool would not let the process end, since TVM waits at its end for those of the first.
    """
    if getattr(_configured, "is_lost", False):
        raise RequestError(
            "this process was forked from one that had computed with a bundle, and has not got its threads; "
            "fork before the first call, or start processes by spawn (multiprocessing.set_start_method)"
        )
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPINS)  # TVM reads it when its first worker begins
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    cpus *= -(-threads // len(cpus))  # TVM makes a pool as large as this list when it makes one
    tvm_ffi.get_global_func("runtime.config_threadpool")(_SHARE_CORES, threads, cpus)
    _configured.threads = threads
    return bool(tvm_ffi.get_global_func("runtime.NumThreads")() == threads)


def load_tvm_runtime(root: Path, manifest: dict[str, Any]) -> None:
    """Load TVM's run-time library, unless it is loaded already: a second copy of it would end the process.

    Raises:
        BundleError: the library cannot be loaded.
    """
    if tvm_ffi.get_global_func("runtime.config_threadpool", allow_missing=True) is None:
        _load(root, manifest, TVM_RUNTIME)
    if is_cuda(manifest) and tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is None:
        _load(root, manifest, TVM_CUDA)


def _load(root: Path, manifest: dict[str, Any], name: str) -> None:
    library = member(root, name).resolve()
    try:
        tvm = importlib.util.find_spec("tvm")
    except (ImportError, ValueError):
        tvm = None
    installed = Path(tvm.origin).parent / name if tvm is not None and tvm.origin else None
    # The same library at the place where `import tvm` would look for it: so that this import still works afterwards.
    if installed is not None and installed.is_file() and sha256(installed) == manifest["files"][name]["sha256"]:
        library = installed
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        versions = manifest.get("versions")
        built = versions.get("apache-tvm-ffi") if isinstance(versions, dict) else None
        advice = f"install apache-tvm-ffi {built or 'as its README.md says'}"
        raise BundleError(f"{library}: cannot be loaded ({error}); {advice}") from error
