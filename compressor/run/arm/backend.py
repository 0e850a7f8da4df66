"""Make bundles for ARM: compiled anywhere, executed on such a machine, or under an emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compressor.codegen.backend import DumpPhase, Written
from compressor.codegen.remote_tuning import RemoteSession
from compressor.host.remote.client import device_facts
from compressor.run.native import NativeBackend

if TYPE_CHECKING:
    from compressor.codegen.targets.arm import Arm


class ArmBackend(NativeBackend):
    """Make and check bundles for ARM (:class:`compressor.codegen.backend.Backend`)."""

    _target: Arm

    @cached_property
    def session(self) -> RemoteSession | None:
        """Return the device that kernels are timed on; None where none is asked for."""
        address = self._target.address()
        return None if address is None else RemoteSession(address, device_facts(address))

    @property
    def timed(self) -> bool:
        """Whether speed says something: here, or on the device."""
        return super().timed if self.session is None else not self.session.is_emulated

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the kernels for all levels; the device is free again afterwards.

        Raises:
            LostDeviceError: the device was lost, and did not come back; what was timed is kept.
        """
        try:
            super().compile(graph, tune, pinned, dump)
        finally:
            if self.session is not None:
                self.session.close()

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write the files of a bundle, and say in the manifest what system other than Linux it is for."""
        written = super().write(folder, graph, independent)
        system = self._target.system
        return (
            written if system == "linux" else dataclasses.replace(written, fields={**written.fields, "system": system})
        )

    def why_not(self) -> str:
        """Say why nothing runs here, or that it was emulated, or on which device it ran."""
        if reason := self._target.why_not(self.isa):
            return f"kernels for {self.isa.name} are compiled, not executed, and nothing was measured: {reason}"
        if self.session is not None:
            where = f"{self.session.name}, {self.session.address}"
            told = "where speed says nothing" if self.session.is_emulated else "and speed was measured there"
            return f"kernels and quality were checked on {where}, {told}"
        return f"kernels and quality are emulated (QEMU, {self.launcher[-1]}): speed there says nothing"
