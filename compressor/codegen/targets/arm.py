"""ARM of 64 bits, in Linux, Android and macOS: compiled anywhere, executed on such machines or under QEMU."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from compressor_runtime import missing_features
from compressor_runtime.cpu import lacking

from compressor.codegen.isa import Isa
from compressor.codegen.linker import find_linker, link_shared
from compressor.codegen.neon import DOTPROD, I8MM, ISAS, NEON
from compressor.errors import UsageError
from compressor.host import emulation
from compressor.host.devices import DeviceFigures, find_device, known_devices
from compressor.host.remote.address import SCHEME, DeviceAddress
from compressor.host.remote.client import ask_device, device_facts
from compressor.host.remote.launch import launcher
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
        device: ``rpc://HOST:PORT/KEY`` of a device that `compress device serve` serves: kernels are timed and checked
            there; or the name of one whose speed the plan foresees, such as ``pi5`` (`compress list devices`).  As
            ``--device``.
    """

    backend: ClassVar[str] = "compressor.run.arm.backend:ArmBackend"
    verifies: ClassVar[bool] = True

    isa: Literal["any", "i8mm", "dotprod", "neon"] = "any"
    system: Literal["linux", "android", "macos"] = "linux"
    cpu: Literal["", "cortex-a53", "cortex-a76", "neoverse-n1", "max"] = ""
    device: str = field(default="", metadata={"affects_content": False})

    def __post_init__(self) -> None:
        """Refuse a device that cannot be reached by this name.

        Raises:
            UsageError: it is neither an address nor a name in the table, or the bundle is not for Linux.
        """
        if self.device and self.address() is None:
            find_device(self.device)

    def figures(self) -> DeviceFigures | None:
        """Return the published figures of the device that is named, also as the key of an address; None without one."""
        key = self.device.rpartition("/")[2]
        return known_devices().get(key)

    def address(self) -> DeviceAddress | None:
        """Return where the device listens; None where none is asked for, or only foreseen."""
        if not self.device.startswith(SCHEME):
            return None
        if self.system != "linux":
            raise UsageError(f"target arm: a device is served in Linux, and the system is {self.system}")
        return DeviceAddress.parse(self.device)

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
        if (address := self.address()) is not None:
            facts = device_facts(address)
            lacks = lacking(isa.cpu_flags, facts["features"])
            return f"{facts['name']} lacks {', '.join(lacks)}" if lacks else ""
        if _is_here():
            lacks = missing_features(isa.cpu_flags)
            return f"this CPU lacks {', '.join(lacks)}" if lacks else ""
        return emulation.why_not()

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return the command that runs its arguments on the device, or on an emulated processor; nothing on a machine
        of this kind.
        """
        if self.address() is not None:
            return launcher(self.device)
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
        """Make sure of a linker, of TVM's run-time for these machines, and of the device.

        Raises:
            ToolchainError: there is none.
            LostDeviceError: the device does not answer.
            UsageError: it cannot run the level that is asked for.
        """
        find_linker(TRIPLES[self.system])
        self.tvm_runtime()
        if (address := self.address()) is None:
            return
        facts = ask_device(address)
        if facts["machine"] != "aarch64":
            raise UsageError(
                f"device {address} ({facts['name']}) is an {facts['machine']}, and kernels are for aarch64"
            )
        if reason := self.why_not(self.resolve()):
            has = [name for name, isa in ISAS.items() if not lacking(isa.cpu_flags, facts["features"])]
            raise UsageError(
                f"device {address}: {reason}, which {self.resolve().name} needs; it has "
                f"{', '.join(has) or 'no level that kernels are made for'}: name one as `isa`, or `any`"
            )

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link with a compiler for this triple, see :mod:`compressor.codegen.linker`.

        Raises:
            ToolchainError: there is none, or the link failed.
        """
        link_shared(output, objects, TRIPLES[self.system])


def _is_here() -> bool:
    return platform.machine() == "aarch64" and platform.system() == "Linux"
