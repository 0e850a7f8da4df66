"""Null: lower, plan memory and write a manifest, but generate nothing; for tests of everything else, and as an example.

Nothing of a null bundle can be run.  It needs no compiler and no linker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compressor.codegen.backend import Check, DumpPhase, Written
from compressor.codegen.isa import Isa
from compressor.errors import UsageError
from compressor.graph.model import weight_bytes

if TYPE_CHECKING:
    import tvm
    from torch.fx import GraphModule

    from compressor.codegen.lowering.compile import Lowered

NULL = Isa("null", 8)
"""Eight lanes and no instruction of its own: kernels are written down for it and never compiled."""

_LOCK_AND_MANIFEST_BYTES, _PARAMETER_BYTES = 8_000, 160  # fitted to a bundle


@dataclass(frozen=True)
class Null:
    """A machine that is not there."""

    backend: ClassVar[str] = "compressor.codegen.targets.null:NullBackend"

    def resolve(self) -> Isa:
        """Return the one instruction set."""
        return NULL

    def faster(self) -> tuple[Isa, ...]:
        """Return nothing."""
        return ()

    def executes(self, isa: Isa) -> bool:
        """Nothing does."""
        return False

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """Return TVM's description of any CPU: phases ask it for limits."""
        import tvm

        return tvm.target.Target("llvm")

    def check_toolchain(self) -> None:
        """Ask for nothing."""


class NullBackend:
    """Lower graphs and keep what is known of them (:class:`compressor.codegen.backend.Backend`)."""

    isa = None
    runs_here = False
    timed = False
    launcher: Sequence[str] = ()
    processes: int = 1
    tried: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def __init__(self, target: Null, _threads: int | None = None) -> None:
        self._target = target
        self._lowered: Lowered | None = None
        self.schedules: dict[str, dict[str, Any]] = {}

    def check(self, graph: GraphModule) -> None:
        """Refuse nothing."""

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Estimate lock and manifest, and look at the tokenizer: weights are not written."""
        source = graph.meta["model"].source
        tokenizer = None if source is None else source / "tokenizer.json"
        known = tokenizer.stat().st_size if tokenizer is not None and tokenizer.is_file() else 0
        return known + _LOCK_AND_MANIFEST_BYTES + _PARAMETER_BYTES * sum(1 for _ in graph.parameters())

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Lower the graph; there is nothing to tune."""
        from compressor.codegen.lowering.compile import lower_graph
        from compressor.codegen.lowering.kernel_set import cpu_kernels
        from compressor.codegen.tuning import Tuner

        tuner = Tuner("off", 1, None, NULL.name, pinned=pinned)
        self._lowered = lower_graph(graph, self._target.tvm_target(NULL), cpu_kernels(NULL), tuner, dump(None))
        self.schedules = tuner.chosen

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write no file."""
        assert self._lowered is not None
        fields = {
            "format": "compressor null bundle",
            "schema_version": 1,
            "parameters": self._lowered.parameters,
            "weight_bytes": weight_bytes(graph),
        }
        return Written(fields, [{**kernel, "evidence": "none"} for kernel in self._lowered.kernels])

    def check_kernels(self, folder: Path) -> tuple[float, Sequence[Check]]:
        """Raise: there are none."""
        raise UsageError(self.why_not())

    def open(self, folder: Path) -> Any:
        """Raise: nothing computes."""
        raise UsageError(self.why_not())

    def why_not(self) -> str:
        """Say why nothing was measured."""
        return "the target null generates no kernels: nothing was checked or measured"
