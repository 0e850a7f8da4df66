"""Make bundles of image classifiers in WebAssembly alone, checked and evaluated where wasmtime runs them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from compressor.codegen.backend import Check, DumpPhase, Written
from compressor.codegen.targets.wasm import Wasm
from compressor.codegen.web.lower import WebProgram, compile_wasm
from compressor.codegen.web.session import WebBundle
from compressor.errors import UsageError
from compressor.export.vectors import make_vectors
from compressor.export.web import SHIPPED_WASM, WebParts, write_web
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.host.resources import resource
from compressor.plan.durations import linear_kernels
from compressor.run.estimates import MANIFEST_BYTES, SITE_BYTES, files_bytes
from compressor.run.native import check_kernels_of
from compressor.run.web import WebProcess
from compressor.verify.smoke import worst_error

_KERNEL_BYTES, _BYTES, _STEP_BYTES = 5_500, 30_000, 120  # of WebAssembly, fitted to small networks


class WasmBackend:
    """Make and check bundles for WebAssembly (:class:`compressor.codegen.backend.Backend`)."""

    isa = None  # nothing of what kernels do on the users' devices is foreseen
    timed = False
    launcher = ()
    processes = 1

    def __init__(self, target: Wasm, _threads: int | None = None) -> None:
        self._target = target
        self._made: tuple[WebProgram, bytes] | None = None
        self._vectors: dict[str, torch.Tensor] = {}
        self._bundle: WebBundle | None = None
        self.schedules: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @cached_property
    def runs_here(self) -> bool:
        """Whether this machine can execute the kernels."""
        return self._target.executes(self._target.resolve())

    def check(self, graph: GraphModule) -> None:
        """Refuse all but modules of one float32 input and one output, and what has no kernel."""
        info: ModelInfo = graph.meta["model"]
        if info.kind != "module" or info.hears:
            what = "a model of speech" if info.hears else f"a {info.kind}"
            raise UsageError(
                f"{info.name}: the target wasm serves image classifiers, this is {what}; take the target webgpu or x86"
            )
        inputs = graph.meta["inputs"][0]
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        count = 1 if isinstance(outputs, torch.fx.Node) else len(outputs)
        if len(inputs) != 1 or inputs[0].dtype != torch.float32 or count != 1:
            raise UsageError(
                f"{info.name}: the target wasm serves models of one float32 input and one output, this one has "
                f"{len(inputs)} inputs ({', '.join(str(x.dtype).removeprefix('torch.') for x in inputs)}) and {count} "
                "outputs; take the target x86"
            )
        check_kernels_of(graph, (self._target.resolve(),))

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Count the weights, look at shipped files, estimate program and manifest."""
        shipped = [resource("export") / "web" / name for name in SHIPPED_WASM]
        program = _BYTES + _KERNEL_BYTES * len(linear_kernels(graph)) + _STEP_BYTES * len(graph.graph.nodes)
        files = files_bytes(shipped, graph.meta["model"])
        return weight_bytes(graph) + files + program + MANIFEST_BYTES + SITE_BYTES * sum(1 for _ in graph.parameters())

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the program and its module."""
        if tune == "full":
            self.notes.append("tune: full changes nothing for wasm: its kernels have the shipped constants everywhere")
        isa = self._target.resolve()
        self._made = compile_wasm(graph, isa, dump(isa))
        if self.runs_here:
            self._vectors = make_vectors(graph)

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write program, weights and run-time."""
        assert self._made is not None
        program, module = self._made
        evidence = "executed" if self.runs_here else "compiled"
        parts = WebParts(
            name=graph.meta["model"].name,
            graph=graph,
            parameters=program.parameters,
            constants={name: torch.from_numpy(array.copy()) for name, array in program.constants.items()},
            program=None,
            wasm=(program.content, module),
            kernels=[{**record, "engine": "wasm", "evidence": evidence} for record in program.kernels],
        )
        return write_web(folder, parts)

    def check_kernels(self, folder: Path) -> tuple[float, list[Check]]:
        """Run the stored vectors."""
        from compressor_selfcheck import output_errors

        stored = {name: tensor.numpy() for name, tensor in self._vectors.items()}
        self._bundle = WebBundle(folder, "wasm")
        found = self._bundle.classes(stored["input_0"])
        errors = output_errors(found.reshape(-1, found.shape[-1]).astype(np.float64), stored, 0)
        error = worst_error(errors, float(stored["tolerance"][0]))
        return error, [Check("WebAssembly", True, f"all kernels executed on wasmtime, relative error {error:.2g}")]

    def open(self, folder: Path) -> WebProcess:
        """Open the bundle in this process; once checked, its kernels are compiled already."""
        return WebProcess(self._bundle or WebBundle(folder, "wasm"))

    def why_not(self) -> str:
        """Say why nothing was measured."""
        return "kernels are compiled, not executed: nothing was measured; `pip install wasmtime` runs them here"
