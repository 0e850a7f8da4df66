"""What a run makes for targets whose kernels are libraries: compiled, linked, and run here where this machine can."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compressor.codegen.lowering.compile import Library, compile_graph
from compressor.codegen.target import NativeTarget
from compressor.errors import CompressorError
from compressor.evaluate.models import BundleProcess
from compressor.export.facts import model_facts
from compressor.export.native import BundleParts, FasterLibrary, fill_bundle
from compressor.export.vectors import make_vectors
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.runtime import read_manifest
from compressor.verify.check import Check
from compressor.verify.smoke import smoke_test

if TYPE_CHECKING:
    from compressor.codegen.isa import Isa

Dumper = Callable[["Isa | None"], Callable[[str, str], None] | None]


class NativeMaker:
    """Makes and checks a bundle that Python and C++ load.

    Attributes:
        runs_here: whether this machine can execute the kernels.
        timed: whether their speed here says something.
        schedules, tried, notes: of all libraries; see :class:`compressor.codegen.lowering.compile.Library`.
    """

    timed = True

    def __init__(self, target: NativeTarget, threads: int | None) -> None:
        self._target, self._threads = target, threads
        self._libraries: list[Library] = []
        self.runs_here = target.executes(target.resolve())
        self.schedules: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: Dumper
    ) -> None:
        """Generate the kernels for all instruction sets."""
        for isa in (None, *self._target.faster()):
            library = compile_graph(
                graph, self._target, isa=isa, tune=tune, threads=self._threads, pinned=pinned, dump=dump(isa)
            )
            self._libraries.append(library)
            self.schedules |= library.schedules
            self.tried += library.tried
            self.notes += [note for note in library.notes if note not in self.notes]

    def write(
        self,
        folder: Path,
        graph: GraphModule,
        recipe: Recipe,
        context: Context,
        dense_weight_bytes: int,
        lock: str,
        independent: bool,
    ) -> dict[str, Any]:
        """All files of the bundle; returns its manifest."""
        assemble(
            folder, graph, self._libraries, self._target, recipe, context, dense_weight_bytes, lock,
            independent=independent,
        )  # fmt: skip
        self._libraries.clear()  # they hold memory, which the rest of the run needs
        return read_manifest(folder)

    def check(self, folder: Path) -> tuple[float, list[Check]]:
        """The kernels' error against the graph, and what else was made sure of."""
        smoke = smoke_test(folder, self._threads)
        checks = [Check("smoke test", True, f"loaded in {smoke.load_s:.2f} s and ran without torch")]
        if self._target.faster():
            isas = (*self._target.faster(), self._target.resolve())
            checks += [self._check_library(folder, isa) for isa in isas]
        return smoke.error, checks

    def process(self, folder: Path) -> BundleProcess:
        """The bundle in a process of its own, to be evaluated."""
        return BundleProcess(folder, self._threads)

    def why_not(self) -> str:
        """Why nothing runs here, in words."""
        return f"kernels are compiled for {self._target.resolve().name}, which this machine lacks: nothing was measured"

    def _check_library(self, folder: Path, isa: Isa) -> Check:
        """What came of running the kernels for one of several instruction sets."""
        if not self._target.executes(isa):
            return Check(f"kernels for {isa.name}", None, "this machine lacks it: compiled, not executed")
        error = smoke_test(folder, self._threads, isa.name).error
        return Check(f"kernels for {isa.name}", True, f"executed, relative error {error:.2g}")


_LINKING_BYTES = 32 * 10**6  # objects and library; those of 50 kernels take a tenth of it


def assemble(
    folder: Path,
    graph: GraphModule,
    libraries: Sequence[Library],
    target: NativeTarget,
    recipe: Recipe,
    context: Context,
    dense_weight_bytes: int,
    lock: str | None = None,
    *,
    independent: bool,
) -> None:
    """Link the libraries and write all files of a bundle, with the text of its lock, into the empty ``folder``.

    Args:
        libraries: the one that all CPUs run which the bundle is for, and faster ones, best first.
        independent: no batch entry depends on another, so that the run-time may divide a batch.
    Raises:
        CompressorError: there is no room, in the temporary folder or in ``folder``.
    """
    info: ModelInfo = graph.meta["model"]
    with tempfile.TemporaryDirectory() as scratch:
        _check_room(Path(scratch))
        library, *faster = libraries
        shared = Path(scratch) / "model.so"
        library.save(shared, target)
        linked = [FasterLibrary(Path(scratch) / f"{n}.so", x.isa.name, x.isa.cpu_flags) for n, x in enumerate(faster)]
        for one, file in zip(faster, linked, strict=True):
            one.save(file.path, target)
        parts = BundleParts(
            graph=graph,
            parameters=library.parameters,
            library=shared,
            vectors=make_vectors(graph),
            model=model_facts(graph) | ({"entry_bytes": library.entry_bytes} if independent else {}),
            recipe=recipe.resolved(),
            sites=[dataclasses.asdict(record) for record in context.records],
            kernels=[kernel for one in libraries for kernel in one.kernels],
            cpu_features=library.isa.cpu_flags,
            isa=library.isa.name,
            faster=linked,
            dense_weight_bytes=dense_weight_bytes,
            calibration=None if context.samples is None else context.samples.facts(),
            tokenizer=info.source if info.kind != "module" else None,
            lock=lock,
        )
        fill_bundle(folder, parts)


def _check_room(scratch: Path) -> None:
    """LLVM ends the process, without a word of where, when it cannot write its objects."""
    free = shutil.disk_usage(scratch).free
    if free < _LINKING_BYTES:
        raise CompressorError(
            f"{scratch.parent}: the folder for temporary files has {free / 1e6:.1f} MB left, and linking needs "
            f"{_LINKING_BYTES / 1e6:.0f} MB; free some space, or set TMPDIR to a folder that has more"
        )
