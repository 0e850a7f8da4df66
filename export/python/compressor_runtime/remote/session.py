"""Give one client its functions: they say what the device is, time kernels, keep files and run programs.

Each takes and gives texts and bytes.  What goes wrong here (a full disk, a kernel that hangs) is an answer.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressor_runtime.remote.facts import describe
from compressor_runtime.remote.kernels import Kernels
from compressor_runtime.remote.programs import Files, Program
from compressor_runtime.vm import tvm_ffi

PREFIX = "compressor.remote."
"""Of the names of the functions."""


def register(scratch: Path, files: Path) -> None:
    """Register the functions of a session in this process.

    Args:
        scratch: folder for what only this session needs.
        files: folder of files that sessions leave for the next.
    """
    kernels, kept, running = Kernels(scratch), Files(files), list[Program]()

    def start(text: str) -> str:
        running.append(Program.start(scratch / str(len(running)), kept, json.loads(text)))
        return json.dumps({})

    functions: dict[str, Callable[..., Any]] = {
        "describe": lambda: json.dumps(describe(scratch)),
        "operand": lambda text, data: json.dumps(kernels.operand(json.loads(text), data)),
        "time": lambda text, data: json.dumps(kernels.time(json.loads(text), data)),
        "missing": lambda text: json.dumps({"missing": kept.missing(json.loads(text))}),
        "file": lambda text, data: json.dumps(kept.take(json.loads(text), data)),
        "start": start,
        "write": lambda data: running[-1].write(bytes(data)),
        "close": lambda: running[-1].close(),
        "read": lambda seconds: running[-1].read(seconds),
    }
    for name, function in functions.items():
        tvm_ffi.register_global_func(PREFIX + name, answering(function, scratch.parent), override=True)


def answering(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Turn errors of the system into answers: ``{"error": where and why, "errno": number}``.

    Args:
        folder: that is named where the system names no file.
    """

    def run(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            why = f"{error.filename or folder}: {error.strerror or error}"
            return json.dumps({"error": why, "errno": error.errno or 0})
        except MemoryError:
            return json.dumps({"error": "out of memory", "errno": errno.ENOMEM})

    return run
