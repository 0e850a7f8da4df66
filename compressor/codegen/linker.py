"""Link object files into shared libraries, for this machine's processors or for others.

A triple names the machine as LLVM does: processor, system, and C library ("aarch64-linux-gnu").
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from compressor.errors import ToolchainError

X86_64 = "x86_64-linux-gnu"
_HERE = ("c++", "g++", "clang++")
_ZIG_TARGETS = {"arm64-apple-macos": "aarch64-macos"}
_MACOS = ("-undefined", "dynamic_lookup")  # symbols of TVM's run-time, which loads the library


def find_compiler(triple: str = X86_64) -> list[str]:
    """Return the command of a C++ compiler for a triple: the one on PATH, else the ``ziglang`` package's.

    Raises:
        ToolchainError: there is neither.
    """
    names = _names(triple)
    for name in names:
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        target = _ZIG_TARGETS.get(triple, triple) + (".2.28" if triple.endswith("linux-gnu") else "")
        return [sys.executable, "-m", "ziglang", "c++", "-target", target]
    package = "g++" if names == _HERE else f"g++-{triple}"
    advice = f"`apt-get install {package}` or " if triple.endswith("linux-gnu") else ""
    raise ToolchainError(
        f"no C++ compiler to link the kernels for {triple} with: none of {', '.join(names)} is on PATH and the package "
        f"ziglang is not installed; install one, for instance {advice}`pip install 'compressor[zig]'`"
    )


def find_linker(triple: str = X86_64) -> list[str]:
    """Return the command that links objects into a shared library: a compiler, or LLVM's linker by itself.

    Android's kernels need no library: what they call of libm, whoever loads them has loaded.

    Raises:
        ToolchainError: there is none.
    """
    if triple.endswith("android"):
        if path := shutil.which("ld.lld"):
            return [path, "-shared"]
        if importlib.util.find_spec("ziglang") is not None:
            return [sys.executable, "-m", "ziglang", "ld.lld", "-shared"]
        raise ToolchainError(
            f"no linker for {triple}: ld.lld is not on PATH and the package ziglang is not installed; install one, for "
            "instance `apt-get install lld` or `pip install 'compressor[zig]'`"
        )
    return [*find_compiler(triple), "-shared", "-fPIC", *(_MACOS if triple in _ZIG_TARGETS else ())]


def _names(triple: str) -> tuple[str, ...]:
    """Return the names of compilers that make code for a triple: on a machine of that kind, the plain ones."""
    machine, system = ("arm64", "Darwin") if triple in _ZIG_TARGETS else (triple.partition("-")[0], "Linux")
    is_here = machine == platform.machine() and system == platform.system()
    return _HERE if is_here else (f"{triple}-g++", f"{triple}-clang++")


def link_shared(output: str, objects: Sequence[str], triple: str = X86_64) -> None:
    """Link objects into the shared library ``output``.

    Raises:
        ToolchainError: there is no compiler, or the link failed.
    """
    command = [*find_linker(triple), "-o", output, *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"linking the kernels failed: {' '.join(command)}\n{done.stderr.strip()}")
