"""Say what a backend is: whatever makes, checks and opens the bundles of one kind.

A target names its backend (``backend = "module:Class"``, :class:`compressor.codegen.target.Target`), since the shipped
ones need rooms above this one; :func:`make_backend` finds it.  A backend writes only the files of its own; tokenizer,
lock and manifest are written for all of them by :func:`compressor.export.bundle.write_bundle`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from compressor.errors import CompressorError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.fx import GraphModule

    from compressor.codegen.isa import Isa
    from compressor.codegen.target import Target

DumpPhase = Callable[["Isa | None"], "Callable[[str, str], None] | None"]
"""Gives, for an instruction set (None: the bundle's first), what takes (phase, text) after each phase; or None."""


@dataclass(frozen=True)
class Check:
    """State the outcome of one check: of a run beside its gates, or of a bundle.

    Attributes:
        name: what is checked.
        passed: None where it could not be checked, or where its answer is not a reason to fail.
        detail: what was found, or why it was not checked.
    """

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        result = {True: "passed", False: "FAILED", None: "not checked"}[self.passed]
        return f"{self.name}: {result}: {self.detail}"


@dataclass(frozen=True)
class Written:
    """What a backend has written into a bundle's folder.

    Attributes:
        fields: of the manifest, those of this kind of bundle: ``format``, ``schema_version``, ``weight_bytes``, ...
        kernels: name, evidence, ... of each.
        hashes: SHA-256 of those files whose hash is known already.
        model: additions to what the manifest says of the model.
    """

    fields: Mapping[str, Any]
    kernels: Sequence[Mapping[str, Any]] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


class OpenBundle(Protocol):
    """A bundle that computes on this machine; a backend's bundles need the methods of the models that it serves."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a decoder's logits [B, S, V] for ids [B, S], from an empty cache."""

    def continued(self, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the likeliest next tokens of a decoder's prompts [B, S], step by step, [B, count]."""

    def hidden(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return an encoder's last hidden state [B, S, H] for ids and mask [B, S]."""

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a plain module's output for its one input."""


class Backend(Protocol):
    """Make, check and open bundles of one kind; one instance serves one run.

    Attributes:
        isa: instruction set whose speed and memory the plan foresees; None where nothing is foreseen.
        runs_here: this machine executes the kernels, by itself or through ``launcher``.
        timed: their speed here says something about the machines that the bundle is for.
        launcher: what stands before the command of a process that runs the kernels: nothing, an emulator, or a command
            that runs its arguments on a device.
        processes: that check the kernels.
        schedules: the chosen schedules by kernel, for the lock.
        tried: for each kernel that was timed, what was tried and what won.
        notes: what the user should know.
    """

    isa: Isa | None
    runs_here: bool
    timed: bool
    launcher: Sequence[str]
    processes: int
    schedules: Mapping[str, Mapping[str, Any]]
    tried: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    def check(self, graph: GraphModule) -> None:
        """Raise a UsageError that says what of the graph this backend cannot serve; parameters may have no data.

        Asked of the captured graph and after each pass, before any of them does its work.
        """

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Estimate the bytes of all files of the bundle; parameters may have no data."""

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the kernels; ``tune`` as in the recipe, ``pinned`` the schedules of a lock."""

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write the files of this kind of bundle into the empty ``folder``.

        Args:
            independent: no batch entry depends on another, so that a run-time may divide a batch.
        """

    def check_kernels(self, folder: Path) -> tuple[float, Sequence[Check]]:
        """Return the kernels' largest relative error against the graph, and what else was made sure of.

        Raises:
            VerificationError: the kernels do not compute what the graph does.
        """

    def open(self, folder: Path) -> AbstractContextManager[OpenBundle]:
        """Open the bundle on this machine, to be evaluated."""

    def why_not(self) -> str:
        """Say why nothing runs here, or how slowly, in words."""


def make_backend(target: Target, threads: int | None = None) -> Backend:
    """Import the backend that a target names, and make one for a run.

    Args:
        threads: for tuning and for timing; None takes the physical cores.
    Raises:
        CompressorError: there is no such class.
    """
    path, _, name = target.backend.partition(":")
    try:
        kind = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise CompressorError(
            f"target {type(target).__name__}: its backend {target.backend!r} cannot be imported: {error}"
        ) from error
    return cast(Backend, kind(target, threads))
