"""Time kernels, each in a process of its own, which may hang or be ended by an instruction that this CPU lacks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.tensors import to_tvm
from compressor_runtime.vm import configure_threads, tvm_ffi

_WORKING_SET_BYTES, _MOST_COPIES = 48 << 20, 16  # weights come from memory, as they do in a model
_PARENT_DEATH_SIGNAL = 1  # of prctl
_LEAST, _MOST, _SECONDS = 10, 200, 0.2


def die_with_parent() -> None:
    """Have Linux end this process with the one that forked it."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Kernels:
    """The operands of one kernel, and the timing of its candidates.

    Args:
        folder: for their libraries.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._operands: list[NDArray[Any]] = []

    def operand(self, header: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Take an operand: its ``index``, ``dtype`` and ``shape``; index 0 begins another kernel's."""
        if header["index"] == 0:
            self._operands.clear()
        self._operands.append(np.frombuffer(bytes(data), header["dtype"]).reshape(header["shape"]))
        return {}

    def time(self, request: dict[str, Any], library: bytes) -> dict[str, Any]:
        """Time the function ``kernel`` of a library on the operands: ``threads``, and ``limit_s`` for all of it.

        Returns:
            ``seconds``, the median of a call; else ``failed``: why, or ``signal``: that ended the kernel.
        """
        path = self._folder / "kernel.so"
        path.write_bytes(library)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.closerange(3, writing)  # the client's connection among them, which would outlive the session
            os.closerange(writing + 1, 1024)
            die_with_parent()
            _become(path, self._operands, request, writing)
        os.close(writing)
        try:
            return _answer(child, reading, float(request["limit_s"]))
        finally:
            os.close(reading)
            path.unlink(missing_ok=True)


def _answer(child: int, reading: int, limit_s: float) -> dict[str, Any]:
    """Wait for a process's answer, or for its end."""
    is_late = not select.select([reading], [], [], limit_s)[0]
    data = b"" if is_late else b"".join(iter(lambda: os.read(reading, 1 << 16), b""))
    if is_late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if is_late:
        return {"failed": f"did not end within {limit_s:g} s"}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return dict(json.loads(data)) if data else {"failed": f"its process ended with {os.waitstatus_to_exitcode(status)}"}


def _become(library: Path, operands: list[NDArray[Any]], request: dict[str, Any], writing: int) -> None:
    """Be the process that calls the kernel, and end."""
    answer: dict[str, Any] = {}
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        configure_threads(int(request["threads"]))
        answer = {"seconds": _median(library, operands)}
    except BaseException as error:
        answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
    with contextlib.suppress(BaseException):
        os.write(writing, json.dumps(answer).encode())
        sys.stdout.flush()
    os._exit(0)


def _median(library: Path, operands: list[NDArray[Any]]) -> float:
    run: Any = tvm_ffi.load_module(str(library))["kernel"]
    count = max(1, min(_MOST_COPIES, _WORKING_SET_BYTES // max(1, sum(x.nbytes for x in operands))))
    copies = [[to_tvm(x.copy()) for x in operands] for _ in range(count)]
    run(*copies[0])
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST or (time.perf_counter() < end and len(times) < _MOST):
        begin = time.perf_counter()
        run(*copies[len(times) % count])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
