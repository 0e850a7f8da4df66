"""ARM of 64 bits, in Linux, Android and macOS: compiled anywhere, executed on such machines or under QEMU."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from compressor_runtime import missing_features

from compressor.codegen.isa import Isa
from compressor.codegen.linker import find_linker, link_shared
from compressor.codegen.neon import DOTPROD, I8MM, ISAS, NEON
from compressor.host import emulation
from compressor.host.wheels import tvm_runtime

if TYPE_CHECKING:
    import tvm

TRIPLES = {"linux": "aarch64-linux-gnu", "android": "aarch64-linux-android", "macos": "arm64-apple-macos"}

EMULATED = {"neon": "cortex-a53", "dotprod": "cortex-a76", "i8mm": "max"}
"""QEMU's processor for each level: it has the level, and not the next one."""


@dataclass(frozen=True)
class Arm:
    """ARMv8 and later: phones, boards and servers.

    Attributes:
        isa: ``neon`` (every such CPU), ``dotprod`` (Cortex-A76, Raspberry Pi 5, Graviton 2), ``i8mm`` (Cortex-A710,
            Graviton 3); or ``any``: kernels for all three in one bundle, which takes the best that it finds where it
            is loaded.
        system: ``linux``; ``android`` and ``macos`` are compiled only, and their bundles have no run-time of TVM's.
        cpu: the processor that QEMU emulates; left out, one that has the level and not the next one.
    """

    backend: ClassVar[str] = "compressor.run.arm.backend:ArmBackend"
    verifies: ClassVar[bool] = True

    isa: Literal["any", "i8mm", "dotprod", "neon"] = "any"
    system: Literal["linux", "android", "macos"] = "linux"
    cpu: Literal["", "cortex-a53", "cortex-a76", "neoverse-n1", "max"] = ""

    def resolve(self) -> Isa:
        """Return the instruction set to generate for; of several, the one that all CPUs have."""
        return NEON if self.isa == "any" else ISAS[self.isa]

    def faster(self) -> tuple[Isa, ...]:
        """Return those that ``any`` adds."""
        return (I8MM, DOTPROD) if self.isa == "any" else ()

    def executes(self, isa: Isa) -> bool:
        """Tell whether this machine can execute code for ``isa``, by itself or under QEMU."""
        return not self.why_not(isa)

    def why_not(self, isa: Isa) -> str:
        """Say why code for ``isa`` is not executed here; an empty text if it is."""
        if self.system != "linux":
            return f"nothing here executes code for {TRIPLES[self.system]}"
        if _is_here():
            lacks = missing_features(isa.cpu_flags)
            return f"this CPU lacks {', '.join(lacks)}" if lacks else ""
        return emulation.why_not()

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return the command that runs its arguments on an emulated processor; nothing on a machine of this kind."""
        return () if _is_here() else emulation.launcher(self.cpu or EMULATED[isa.name])

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """Return TVM's target."""
        import tvm

        fields = {"kind": "llvm", "mtriple": TRIPLES[self.system], "mcpu": isa.mcpu}
        return tvm.target.Target({**fields, "mattr": list(isa.mattr)} if isa.mattr else fields)

    def tvm_runtime(self) -> Path | None:
        """Return the folder of TVM's run-time libraries; None where no wheel has them."""
        return tvm_runtime("aarch64") if self.system == "linux" else None

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless there are a linker and TVM's run-time for these machines."""
        find_linker(TRIPLES[self.system])
        self.tvm_runtime()

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link with a compiler for this triple, see :mod:`compressor.codegen.linker`.

        Raises:
            ToolchainError: there is none, or the link failed.
        """
        link_shared(output, objects, TRIPLES[self.system])


def _is_here() -> bool:
    return platform.machine() == "aarch64" and platform.system() == "Linux"
