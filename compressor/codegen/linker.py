"""Link object files into shared libraries with the C++ compiler that is here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence

from compressor.errors import ToolchainError


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler on PATH, else of the ``ziglang`` package's.

    Raises:
        ToolchainError: there is neither.
    """
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.28"]
    raise ToolchainError(
        "no C++ compiler to link the kernels with: none of c++, g++, clang++ is on PATH and the package ziglang is not "
        "installed; install one, for instance `apt-get install g++` or `pip install 'compressor[zig]'`"
    )


def link_shared(output: str, objects: Sequence[str]) -> None:
    """Link objects into the shared library ``output``.

    Raises:
        ToolchainError: there is no compiler, or the link failed.
    """
    command = [*find_compiler(), "-shared", "-fPIC", "-o", output, *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"linking the kernels failed: {' '.join(command)}\n{done.stderr.strip()}")
