"""Run Python beside the fake driver of ``lockstep``, in a process that finds it where a driver would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import compressor_runtime

_START = """
import ctypes, os, sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "compressor")))
fake = ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
fake.lockstep_configure(int(os.environ["FAKE_CAPABILITY"]), ctypes.c_size_t(int(os.environ["FAKE_BYTES"])))
fake.lockstep_memory_used.restype = ctypes.c_size_t
import numpy as np
import compressor_runtime
from compressor_runtime import load
"""


def on_fake_gpu(
    code: str, *arguments: object, capability: int = 90, size_bytes: int = 1 << 30
) -> subprocess.CompletedProcess[str]:
    """Run code that finds ``fake``, ``np``, ``load``, and a GPU of this compute capability (times 10) and memory."""
    return run_on_fake_gpu(["-c", _START + code, *map(str, arguments)], capability=capability, size_bytes=size_bytes)


def run_on_fake_gpu(
    arguments: list[str], *, capability: int = 90, size_bytes: int = 1 << 30
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments beside the fake driver."""
    from lockstep.compile import home

    known = {"FAKE_CAPABILITY": str(capability), "FAKE_BYTES": str(size_bytes), "LD_LIBRARY_PATH": str(home())}
    path = str(Path(compressor_runtime.__file__).parents[1])
    environment = {**os.environ, **known, "PYTHONPATH": path}
    command = [sys.executable, "-B", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
