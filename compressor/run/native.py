"""Make bundles whose kernels are libraries: compile, link, write, and run them here where this machine can."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.codegen.backend import Check, DumpPhase, Written
from compressor.codegen.kernels.convolution import depthwise
from compressor.codegen.lowering.compile import Library, compile_graph
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.convolutions import reads_groups
from compressor.codegen.lowering.experts.stack import as_lowered
from compressor.codegen.lowering.importer import check_operators
from compressor.codegen.lowering.kernel_set import KernelSet, cpu_kernels
from compressor.codegen.target import NativeTarget
from compressor.codegen.tuning import Tuner
from compressor.errors import CompressorError, UsageError
from compressor.evaluate.models import BundleProcess
from compressor.export.native import FasterLibrary, NativeParts, write_native
from compressor.export.vectors import make_vectors
from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.formats.format import Format
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.graph.sites import packed_weight_sites
from compressor.host.resources import runtime_files
from compressor.numerics.sparsity.n_of_m import pattern_of
from compressor.plan.durations import linear_kernels, lowered_nodes
from compressor.run.estimates import MANIFEST_BYTES, SITE_BYTES, files_bytes
from compressor.verify.smoke import smoke_test

if TYPE_CHECKING:
    from compressor.codegen.isa import Isa
    from compressor.codegen.remote_tuning import RemoteSession

_LINKING_BYTES = 32 * 10**6  # objects and library; those of 50 kernels take a tenth of it
# Fitted to bundles: a library beside its kernels, a kernel, a node of the graph.
_LIBRARY_BYTES, _KERNEL_BYTES, _NODE_BYTES = 130_000, 30_000, 250
_CHECKED_ROWS, _CHECKED_COLUMNS = 36, 1024  # of a decoder's logits, in the stored vectors


class NativeBackend:
    """Make and check bundles that Python and C++ load (:class:`compressor.codegen.backend.Backend`).

    Args:
        threads: for tuning and for timing; None takes the physical cores.
    """

    def __init__(self, target: NativeTarget, threads: int | None = None) -> None:
        self._target, self._threads = target, threads
        self._libraries: list[Library] = []
        self.isa = target.resolve()
        self.schedules: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @cached_property
    def runs_here(self) -> bool:
        """Whether this machine can execute the kernels."""
        return self._target.executes(self.isa)

    @property
    def launcher(self) -> Sequence[str]:
        """What stands before the command of a process that runs the kernels."""
        return self._target.launcher(self.isa)

    @property
    def timed(self) -> bool:
        """Whether speed here says something: an emulator's says nothing."""
        return not self.launcher

    @property
    def session(self) -> RemoteSession | None:
        """Return the device that kernels are timed on, in place of this machine; None where there is none."""
        return None

    @property
    def processes(self) -> int:
        """Count the processes that check the kernels: one, and another for each library of several."""
        return 1 + (1 + len(faster) if (faster := self._target.faster()) else 0)

    def check(self, graph: GraphModule) -> None:
        """Refuse operators without kernels, and formats that those of an instruction set do not read."""
        check_kernels_of(graph, (self.isa, *self._target.faster()))

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Count the weights, look at shipped files, estimate kernels and manifest."""
        info: ModelInfo = graph.meta["model"]
        shipped = [*runtime_files().values()]
        if (folder := self._target.tvm_runtime()) is not None:
            shipped.append(folder / "libtvm_runtime.so")
        kernels = len(linear_kernels(graph)) + info.speculates  # attention's alone are not those of both entries
        library = _LIBRARY_BYTES + _KERNEL_BYTES * kernels + _NODE_BYTES * lowered_nodes(graph)
        parameters = sum(1 for _ in graph.parameters())
        vectors = 4 * _CHECKED_ROWS * min(_CHECKED_COLUMNS, info.vocab_size) + 8 * _CHECKED_COLUMNS
        files = files_bytes(shipped, info)
        return weight_bytes(graph) + files + library + vectors + MANIFEST_BYTES + SITE_BYTES * parameters

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the kernels for all instruction sets."""
        for isa in (None, *self._target.faster()):
            library = compile_graph(
                graph,
                self._target,
                isa=isa,
                kernels=self._kernels,
                tune=tune,
                threads=self._threads,
                pinned=pinned,
                dump=dump(isa),
                device=self.session,
            )
            self._libraries.append(library)
            self.schedules |= library.schedules
            self.tried += library.tried
            self.notes += [note for note in library.notes if note not in self.notes]

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Link the libraries and write the files that make them a bundle.

        Raises:
            CompressorError: there is no room, in the temporary folder or in ``folder``.
        """
        info: ModelInfo = graph.meta["model"]
        with tempfile.TemporaryDirectory() as scratch:
            _check_room(Path(scratch))
            library, *faster = self._libraries
            shared = Path(scratch) / "model.so"
            library.save(shared, self._target)
            linked = [
                FasterLibrary(Path(scratch) / f"{n}.so", one.isa.name, one.isa.cpu_flags)
                for n, one in enumerate(faster)
            ]
            for one, file in zip(faster, linked, strict=True):
                one.save(file.path, self._target)
            parts = NativeParts(
                name=info.name,
                graph=graph,
                parameters=library.parameters,
                entries=library.entries,
                library=shared,
                vectors=make_vectors(graph),
                kernels=[kernel for one in self._libraries for kernel in one.kernels],
                cpu_features=library.isa.cpu_flags,
                isa=library.isa.name,
                faster=linked,
                entry_bytes=library.entry_bytes if independent else None,
                parts=library.parts,
                archs=library.isa.archs,
                tvm_runtime=self._target.tvm_runtime(),
            )
            written = write_native(folder, parts)
        self._libraries.clear()  # they hold memory, which the rest of the run needs
        return written

    def check_kernels(self, folder: Path) -> tuple[float, list[Check]]:
        """Run the kernels in a process of their own, those of each instruction set that this machine has."""
        smoke = smoke_test(folder, self._threads, launcher=self.launcher)
        checks = [Check("smoke test", True, f"loaded in {smoke.load_s:.2f} s and ran without torch")]
        if self._target.faster():
            checks += [self._check_library(folder, isa) for isa in (*self._target.faster(), self.isa)]
        return smoke.error, checks

    def open(self, folder: Path) -> BundleProcess:
        """Open the bundle in a process of its own."""
        return BundleProcess(folder, self._threads, self.launcher)

    def why_not(self) -> str:
        """Say why nothing runs here, or how slowly."""
        if self.runs_here:
            return f"kernels run under {self.launcher[0]}: their speed was not measured"
        return f"kernels are compiled for {self.isa.name}, which this machine lacks: nothing was measured"

    def _kernels(self, isa: Isa) -> KernelSet:
        """Return the kernels for an instruction set."""
        return cpu_kernels(isa)

    def _check_library(self, folder: Path, isa: Isa) -> Check:
        """Run the kernels for one of several instruction sets."""
        if not self._target.executes(isa):
            where = "this machine" if self.session is None else self.session.name
            return Check(f"kernels for {isa.name}", None, f"{where} lacks it: compiled, not executed")
        error = smoke_test(folder, self._threads, isa.name, self._target.launcher(isa)).error
        is_emulated = self._target.launcher(isa) if self.session is None else self.session.is_emulated
        how = "emulated" if is_emulated else "executed"
        return Check(f"kernels for {isa.name}", True, f"{how}, relative error {error:.2g}")


def check_kernels_of(graph: GraphModule, isas: Sequence[Isa]) -> None:
    """Refuse operators without kernels, and formats that those of an instruction set do not read.

    Raises:
        UsageError: names the operator, or the weight and its format.
    """
    graph = as_lowered(graph)
    check_operators(graph, Converter(cpu_kernels(isas[0]), Tuner("off", 1, None, "")).table())
    formats = {}
    for site in packed_weight_sites(graph):
        fmt = Format.parse(str(site.node.args[3]))
        if not site.is_depthwise:
            if (blocks := fmt.extra(ColumnBlocks)) is not None and blocks.is_of_images:
                if not reads_groups(site.node):
                    raise UsageError(
                        f"{site.name}: {fmt.name}: only convolutions of images of fixed size skip groups; "
                        "`ignore` leaves it"
                    )
                continue
            formats[site.name] = fmt.name
        elif reason := depthwise.supports(fmt, site.in_features):
            raise UsageError(f"{site.name}: no kernel for depthwise convolutions: {reason}; `ignore` leaves it")
    routed = torch.ops.compressor.packed_routed_linear.default
    experts = {
        str(node.args[2][0].target): str(node.args[4])
        for node in graph.graph.find_nodes(op="call_function", target=routed)
    }
    for name, format_name in experts.items():
        if (pattern := pattern_of(Format.parse(format_name))) is not None:
            what = "N:M" if isinstance(pattern, KeptOfGroup) else "weights of which single ones are left out"
            raise UsageError(f"{name}: {format_name}: no kernel of experts reads {what}; `ignore` leaves them")
    formats |= experts
    for name, format_name in formats.items():
        fmt = Format.parse(format_name)
        for isa in isas:
            if reason := cpu_kernels(isa).supports(fmt):
                raise UsageError(f"{name}: {fmt.name}: {reason}; take a format without it")


def _check_room(scratch: Path) -> None:
    """Refuse to link in a full folder: LLVM ends the process, without a word of where, when it cannot write."""
    free = shutil.disk_usage(scratch).free
    if free < _LINKING_BYTES:
        raise CompressorError(
            f"{scratch.parent}: the folder for temporary files has {free / 1e6:.1f} MB left, and linking needs "
            f"{_LINKING_BYTES / 1e6:.0f} MB; free some space, or set TMPDIR to a folder that has more"
        )
