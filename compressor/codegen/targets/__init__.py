"""Targets: one file each, or an entry point in the group ``compressor.targets``.

A target is a frozen dataclass whose fields are its options in a recipe (``target: {x86: {isa: avx2}}``).
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from compressor.errors import UsageError

if TYPE_CHECKING:
    import tvm

    from compressor.codegen.isa import Isa

_GROUP = "compressor.targets"


class Target(Protocol):
    """What lowering needs to know of a target.

    Attributes:
        bundle: what a run makes for it: ``native``, libraries that are linked (:class:`NativeTarget`), or ``web``.
    """

    bundle: ClassVar[Literal["native", "web"]]

    def resolve(self) -> Isa:
        """The instruction set to generate for; raises UsageError when it cannot be had."""

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

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link object files into a shared library; raises ToolchainError."""


def available_targets() -> dict[str, str]:
    """Names of all targets with the module (or ``module:Class``) each is in; imports none of them."""
    folder = Path(__file__).parent
    shipped = {
        module.name: f"compressor.codegen.targets.{module.name}" for module in pkgutil.iter_modules([str(folder)])
    }
    return dict(sorted({**{e.name: e.value for e in entry_points(group=_GROUP)}, **shipped}.items()))


def target_class(name: str) -> type[Any]:
    """The dataclass of a target: ``module:Class``, or the capitalised name of the file.

    Raises:
        UsageError: no target has that name (the nearest is named).
    """
    known = available_targets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UsageError(f"target {name!r} is unknown; nearest: {near[0]}; there are: {', '.join(known)}")
    path, _, attribute = known[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(path), attribute or name.capitalize())
    return found
