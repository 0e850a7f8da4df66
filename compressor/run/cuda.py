"""Make bundles whose kernels run on NVIDIA GPUs: compiled anywhere, executed where there is a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.codegen.backend import DumpPhase
from compressor.codegen.gpu.experts.kernel import supports as experts_support
from compressor.codegen.gpu.kernel_set import gpu_kernels
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.experts.stack import as_lowered
from compressor.codegen.lowering.importer import check_operators
from compressor.codegen.lowering.kernel_set import KernelSet
from compressor.codegen.tuning import Tuner
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.kinds.token_trees import tree_graph
from compressor.graph.sites import packed_weight_sites
from compressor.run.native import NativeBackend

if TYPE_CHECKING:
    from compressor.codegen.isa import Isa

_ARCH_BYTES = 400_000  # of kernels for one GPU, for all of a decoder
_EMBEDDING = torch.ops.compressor.packed_embedding.default
_ROUTED = torch.ops.compressor.packed_routed_linear.default


class CudaBackend(NativeBackend):
    """Make and check bundles that Python loads onto a GPU (:class:`compressor.codegen.backend.Backend`)."""

    def check(self, graph: GraphModule) -> None:
        """Refuse operators and formats that have no kernel for GPUs.

        Raises:
            UsageError: names the operator's family, or the weight and its format.
        """
        if (info := graph.meta["model"]).leaves_early:
            raise UsageError(
                f"{info.name}: the target cuda cannot run some blocks alone (early_exit, skip_decode); take x86"
            )
        if info.predicts:
            raise UsageError(f"{info.name}: the target cuda predicts no caches (predict_kv); take the target x86")
        graph, kernels = as_lowered(graph), gpu_kernels(self.isa)
        program = tree_graph(graph) if graph.meta["model"].speculates else graph
        for node in program.graph.nodes:
            name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            if (family := kernels.missing.get(name)) is not None:
                raise UsageError(
                    f"{node.name}: the target cuda has no kernels for {family} ({name.partition('.')[0]}); take the "
                    "target x86"
                )
        check_operators(graph, Converter(kernels, Tuner("off", 1, None, "")).table())
        formats = {site.name: str(site.node.args[3]) for site in packed_weight_sites(graph)}
        formats |= {
            node.name: str(node.args[2]) for node in graph.graph.find_nodes(op="call_function", target=_EMBEDDING)
        }
        routed = {node.name: str(node.args[4]) for node in graph.graph.find_nodes(op="call_function", target=_ROUTED)}
        for name, format_name in (formats | routed).items():
            supports = experts_support if name in routed else kernels.supports
            if reason := supports(Format.parse(format_name)):
                raise UsageError(f"{name}: {format_name}: {reason}; take another format, or the target x86")

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Count what a bundle for CPUs has, TVM's library for GPUs, and code for each of them."""
        folder = self._target.tvm_runtime()
        library = 0 if folder is None else (folder / "libtvm_runtime_cuda.so").stat().st_size
        return super().estimate_bytes(graph) + library + _ARCH_BYTES * len(self.isa.archs)

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the kernels, and note those whose values do not fit into registers."""
        super().compile(graph, tune, pinned, dump)
        kernels = [kernel for library in self._libraries for kernel in library.kernels]
        if spilled := {kernel["name"]: kernel["spill_bytes"] for kernel in kernels if kernel.get("spill_bytes")}:
            listed = ", ".join(f"{name} {count} B" for name, count in spilled.items())
            self.notes.append(f"registers are too few, and a thread's values go to memory, in {listed}; report it")

    def _kernels(self, isa: Isa) -> KernelSet:
        """Return the kernels for GPUs."""
        return gpu_kernels(isa)

    def why_not(self) -> str:
        """Say why nothing runs here."""
        return (
            f"no GPU here that runs code for {', '.join(self.isa.archs)}: the kernels were compiled, not executed, and "
            "nothing was measured; `python compressor_selfcheck.py` in the bundle checks them where there is one"
        )
