"""x86-64 with AVX2, AVX512-VNNI or AMX: detection, TVM target, linking."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from compressor_runtime import allow_tiles

from compressor.codegen.isa import Isa
from compressor.errors import ToolchainError, UsageError
from compressor.host.machine import host_flags

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class X86:
    """Linux on x86-64.

    Attributes:
        isa: ``native`` (the first of the next three that this machine has), ``amx``, ``avx512_vnni``, ``avx2``, or
            ``avx512_vpopcntdq``, for bit planes of 1 and 2 bits; or ``any``: kernels for AMX, AVX512-VNNI and AVX2 in
            one bundle, which takes the best that it finds where it is loaded.
    """

    backend: ClassVar[str] = "compressor.run.native:NativeBackend"

    isa: Literal["native", "any", "amx", "avx512_vnni", "avx2", "avx512_vpopcntdq"] = "native"

    def resolve(self) -> Isa:
        """The instruction set to generate for.

        Raises:
            UsageError: ``native`` on a machine that has none of them.
        """
        if self.isa == "any":
            return AVX2
        if self.isa != "native":
            return ISAS[self.isa]
        for isa in ISAS.values():
            if self.executes(isa):
                return isa
        raise UsageError(
            f"target x86: this machine ({platform.machine()}) has none of {', '.join(ISAS)}; "
            "name the target machine's: target: {x86: {isa: avx2}}"
        )

    def faster(self) -> tuple[Isa, ...]:
        """Those that ``any`` adds."""
        return (AMX, AVX512_VNNI) if self.isa == "any" else ()

    def executes(self, isa: Isa) -> bool:
        """Whether this machine can execute code for ``isa``."""
        return host_flags().issuperset(isa.cpu_flags) and (not isa.tiles or allow_tiles())

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return nothing: what this machine lacks is compiled, not executed."""
        return ()

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """TVM's target; LLVM takes the features from the name of a CPU generation that has just these, or lacks few."""
        import tvm

        fields = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": isa.mcpu}
        return tvm.target.Target({**fields, "mattr": list(isa.mattr)} if isa.mattr else fields)

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless there is a linker."""
        _compiler()

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link with the C++ compiler on PATH, else with the ``ziglang`` package's.

        Raises:
            ToolchainError: there is neither, or the link failed.
        """
        command = [*_compiler(), "-shared", "-fPIC", "-o", output, *objects]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolchainError(f"linking the kernels failed: {' '.join(command)}\n{done.stderr.strip()}")


def _compiler() -> list[str]:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.28"]
    raise ToolchainError(
        "no C++ compiler to link the kernels with: none of c++, g++, clang++ is on PATH and the package ziglang is not "
        "installed; install one, for instance `apt-get install g++` or `pip install 'compressor[zig]'`"
    )


AVX512_VNNI = Isa(
    "avx512_vnni",
    16,
    True,
    False,
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"),
    "cascadelake",
)


AVX2 = Isa("avx2", 8, False, False, ("avx2", "fma", "f16c"), "haswell")


AVX512_VPOPCNTDQ = Isa(
    "avx512_vpopcntdq", 16, True, True, (*AVX512_VNNI.cpu_flags, "avx512_vpopcntdq", "avx512_bitalg"), "icelake-server"
)
"""Only by name: what it adds serves bit planes alone, and its bundles run on fewer machines."""


AMX = Isa(
    "amx",
    16,
    True,
    False,
    (*AVX512_VNNI.cpu_flags, "amx_tile", "amx_int8", "amx_bf16"),
    "cascadelake",
    True,
    ("+amx-tile", "+amx-int8", "+amx-bf16"),
)


ISAS = {isa.name: isa for isa in (AMX, AVX512_VNNI, AVX2, AVX512_VPOPCNTDQ)}
"""Those that ``native`` tries, in this order, and at last those that only a recipe asks for."""
