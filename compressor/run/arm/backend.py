"""Make bundles for ARM: compiled anywhere, executed on such a machine, or under an emulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from compressor.codegen.backend import Written
from compressor.run.native import NativeBackend

if TYPE_CHECKING:
    from compressor.codegen.targets.arm import Arm


class ArmBackend(NativeBackend):
    """Make and check bundles for ARM (:class:`compressor.codegen.backend.Backend`)."""

    _target: Arm

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write the files of a bundle, and say in the manifest what system other than Linux it is for."""
        written = super().write(folder, graph, independent)
        system = self._target.system
        return (
            written if system == "linux" else dataclasses.replace(written, fields={**written.fields, "system": system})
        )

    def why_not(self) -> str:
        """Say why nothing runs here, or that it was emulated."""
        if reason := self._target.why_not(self.isa):
            return f"kernels for {self.isa.name} are compiled, not executed, and nothing was measured: {reason}"
        return f"kernels and quality are emulated (QEMU, {self.launcher[-1]}): speed there says nothing"
