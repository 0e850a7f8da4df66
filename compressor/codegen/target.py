"""Describe targets, one file each (:data:`compressor.registry.TARGETS`).

A target is a frozen dataclass whose fields are its options in a recipe (``target: {x86: {isa: avx2}}``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import tvm

    from compressor.codegen.isa import Isa


class Target(Protocol):
    """What lowering needs to know of a target.

    Attributes:
        backend: ``module:Class`` of what makes its bundles (:class:`compressor.codegen.backend.Backend`), called with
            the target and a number of threads.

    One whose kernels verify drafted tokens says so in an attribute ``verifies``, which is True; where its run-time does
    not have every kind of drafts, ``drafts`` has the names of those that it has.
    """

    backend: ClassVar[str]

    def resolve(self) -> Isa:
        """Return the instruction set to generate for; raise a UsageError when it cannot be had."""

    def faster(self) -> tuple[Isa, ...]:
        """Instruction sets that the bundle gets kernels for as well, best first: a machine takes the first it has."""

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """TVM's description of the target."""

    def executes(self, isa: Isa) -> bool:
        """Whether this machine can execute code for ``isa`` (else kernels are only `compiled`)."""

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless a run has the tools that it needs."""


class NativeTarget(Target, Protocol):
    """A target whose kernels are machine code."""

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return what stands before the command of a process that runs code for ``isa``: nothing, or an emulator."""

    def tvm_runtime(self) -> Path | None:
        """Return the folder of TVM's run-time libraries for the target's machines; None where no wheel has them.

        Raises:
            ToolchainError: they cannot be had.
        """

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link object files into a shared library; raises ToolchainError."""
