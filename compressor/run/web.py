"""Make bundles for browsers: kernels in WGSL and WebAssembly, checked and evaluated where they run here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from compressor.codegen.backend import Check, DumpPhase, Written
from compressor.codegen.isa import INDEPENDENT_ROWS
from compressor.codegen.lowering.experts.stack import as_lowered
from compressor.codegen.lowering.importer import check_operators
from compressor.codegen.targets.webgpu import Webgpu
from compressor.codegen.web.converters.converter import WebConverter, why_unsupported
from compressor.codegen.web.execute_wasm import is_available
from compressor.codegen.web.execute_webgpu import adapter_name, is_software
from compressor.codegen.web.lower import WebProgram, compile_program, compile_wasm
from compressor.codegen.web.session import Engine, WebBundle
from compressor.codegen.web.simd128 import SIMD128
from compressor.errors import UsageError
from compressor.evaluate.generation.greedy import continue_greedily
from compressor.export.vectors import make_vectors
from compressor.export.web import SHIPPED, WebParts, write_web
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.host.resources import resource
from compressor.plan.durations import linear_kernels
from compressor.run.estimates import MANIFEST_BYTES, SITE_BYTES, files_bytes
from compressor.verify.smoke import worst_error

_SERVED = ("decoder", "encoder", "seq2seq")
_KERNEL_BYTES, _KERNELS, _STEP_BYTES = 6000, 10, 60  # fitted; sources are repeated for one token and for several
_WASM_KERNEL_BYTES, _WASM_BYTES = 24_000, 40_000  # of linears, and the rest
_VERIFY_BYTES, _WASM_STEP_BYTES = 8_000, 60  # attention of trees, and the second program's steps
_FEW_BYTES, _WGSL_VERIFY_BYTES = 3_200, 30_000  # a linear of several verified tokens, and the rest in WGSL


class WebBackend:
    """Make and check bundles for browsers (:class:`compressor.codegen.backend.Backend`)."""

    isa = None  # nothing of what kernels do on the users' devices is foreseen
    timed = False  # a software adapter says nothing of them either
    launcher = ()
    processes = 1

    def __init__(self, target: Webgpu, _threads: int | None = None) -> None:
        self._target = target
        self._program: WebProgram | None = None
        self._wasm: tuple[WebProgram, bytes] | None = None
        self._vectors: dict[str, torch.Tensor] = {}
        self._bundles: dict[Engine, WebBundle] = {}
        self.schedules: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @cached_property
    def _engines(self) -> list[Engine]:
        """Those that execute kernels here."""
        can_run: dict[Engine, bool] = {
            "webgpu": self._target.executes(self._target.resolve()),
            "wasm": self._target.wasm and is_available(),
        }
        return [engine for engine, can in can_run.items() if can]

    @property
    def runs_here(self) -> bool:
        """Whether this machine can execute the kernels, in either form."""
        return bool(self._engines)

    def check(self, graph: GraphModule) -> None:
        """Refuse plain modules, models of speech, and operators and formats without kernels in WGSL."""
        info: ModelInfo = graph.meta["model"]
        unserved = "a plain module" if info.kind == "module" else f"a {info.kind}"
        unserved = "a model of speech" if info.hears else unserved
        if info.hears or info.kind not in _SERVED:
            raise UsageError(
                f"{info.name}: the target webgpu serves decoders, encoders and encoder-decoders of text, this is "
                f"{unserved}; take the target x86, or wasm for images"
            )
        if info.leaves_early:
            raise UsageError(
                f"{info.name}: the target webgpu cannot run some blocks alone (early_exit, skip_decode); take x86"
            )
        if info.predicts:
            raise UsageError(f"{info.name}: the target webgpu predicts no caches (predict_kv); take the target x86")
        if info.speculates and info.draft_heads:
            raise UsageError(
                f"{info.name}: browsers have no drafts by heads; leave `draft_heads` or `speculate` out, or take the "
                "target x86"
            )
        if reason := why_unsupported(graph):
            raise UsageError(reason)
        check_operators(as_lowered(graph), WebConverter().table())

    def estimate_bytes(self, graph: GraphModule) -> int:
        """Count the weights, look at shipped files, estimate programs and manifest."""
        shipped = [resource("export") / "web" / name for name in SHIPPED]
        linears = len(linear_kernels(graph))
        program = _KERNEL_BYTES * (linears + _KERNELS) + _STEP_BYTES * len(graph.graph.nodes)
        program += (_WASM_BYTES + _WASM_KERNEL_BYTES * linears) if self._target.wasm else 0
        if graph.meta["model"].speculates:
            program += _WGSL_VERIFY_BYTES + _FEW_BYTES * linears + _STEP_BYTES * len(graph.graph.nodes)
            program += (_VERIFY_BYTES + _WASM_STEP_BYTES * len(graph.graph.nodes)) if self._target.wasm else 0
        parameters = sum(1 for _ in graph.parameters())
        files = files_bytes(shipped, graph.meta["model"])
        return weight_bytes(graph) + files + program + MANIFEST_BYTES + SITE_BYTES * parameters

    def compile(
        self, graph: GraphModule, tune: str, pinned: Mapping[str, Mapping[str, Any]] | None, dump: DumpPhase
    ) -> None:
        """Generate the programs."""
        if tune == "full":
            self.notes.append(
                "tune: full changes nothing for webgpu: its kernels have the shipped constants everywhere"
            )
        self.check(graph)  # once more: a pass that plans nothing may have left what is not served
        self._program = compile_program(graph, self._target.tvm_target(self._target.resolve()), dump(None))
        if self._target.wasm:
            self._wasm = compile_wasm(graph, SIMD128, dump(SIMD128))
        if self.runs_here:
            self._vectors = make_vectors(graph)

    def write(self, folder: Path, graph: GraphModule, independent: bool) -> Written:
        """Write programs, weights, run-time and page."""
        assert self._program is not None
        programs: dict[Engine, WebProgram] = {"webgpu": self._program}
        if self._wasm is not None:
            programs["wasm"] = self._wasm[0]
        constants = {name: array for one in programs.values() for name, array in one.constants.items()}
        parts = WebParts(
            name=graph.meta["model"].name,
            graph=graph,
            parameters=list(dict.fromkeys(name for one in programs.values() for name in one.parameters)),
            constants={name: torch.from_numpy(array.copy()) for name, array in constants.items()},
            program=self._program.content,
            wasm=None if self._wasm is None else (self._wasm[0].content, self._wasm[1]),
            kernels=[
                {**record, "engine": engine, "evidence": "executed" if engine in self._engines else "compiled"}
                for engine, one in programs.items()
                for record in one.kernels
            ],
        )
        return write_web(folder, parts)

    def check_kernels(self, folder: Path) -> tuple[float, list[Check]]:
        """Run the stored vectors on each engine that is here."""
        names, errors, checks = {"webgpu": "WebGPU", "wasm": "WebAssembly"}, [], []
        for engine in self._engines:
            self._bundles[engine] = WebBundle(folder, engine)
            errors.append(self._error(self._bundles[engine]))
            where = adapter_name() if engine == "webgpu" else "wasmtime"
            text = f"all kernels executed on {where}, relative error {errors[-1]:.2g}"
            text += "; evaluations run on them" if engine == self._evaluator() else ""
            checks.append(Check(names[engine], True, text))
        return max(errors), checks

    def _error(self, bundle: WebBundle) -> float:
        from compressor_selfcheck import output_errors

        stored = {name: tensor.numpy() for name, tensor in self._vectors.items()}
        ids = stored["ids"]
        if "mask" in stored:
            found = bundle.encode(ids, stored["mask"])
        else:
            source = [stored[name] for name in ("source", "source_mask") if name in stored]
            prompt, session = int(stored["prompt"][0]), bundle.session(*ids.shape, *source)
            parts = [ids[:, :prompt], *(ids[:, [i]] for i in range(prompt, ids.shape[1]))]
            found = np.concatenate([session.step(part, np.arange(part.shape[1])) for part in parts], axis=1)
        tables = [found]
        if bundle.verifies:  # the same tokens as drafts, a chain of each sequence after another
            chains, count = bundle.session(*ids.shape), max(1, INDEPENDENT_ROWS // len(ids))
            parts = np.split(ids, range(count, ids.shape[1], count), axis=1)
            tables.append(np.concatenate([chains.verify(part) for part in parts], axis=1))
        tolerance = float(stored["tolerance"][0])
        rows = [table.reshape(-1, table.shape[-1]).astype(np.float64) for table in tables]
        return max(worst_error(output_errors(table, stored, 0), tolerance) for table in rows)

    def _evaluator(self) -> Engine:
        """Choose the engine of evaluations: a software adapter is much slower than WebAssembly, which computes the same
        within the check's tolerance."""
        is_slow = "webgpu" not in self._engines or is_software()
        return "wasm" if "wasm" in self._engines and is_slow else "webgpu"

    def open(self, folder: Path) -> WebProcess:
        """Open the bundle in this process; once checked, its kernels are compiled already."""
        engine = self._evaluator()
        return WebProcess(self._bundles.get(engine) or WebBundle(folder, engine))

    def why_not(self) -> str:
        """Say why nothing was measured."""
        return (
            "kernels are compiled, not executed: nothing was measured; `pip install 'compressor[webgpu]'`, and where "
            "there is no graphics processor Debian's mesa-vulkan-drivers, let this machine run them"
        )


class WebProcess:
    """Compute with a bundle for evaluations, as :class:`compressor.evaluate.models.BundleProcess`."""

    def __init__(self, bundle: WebBundle) -> None:
        self._bundle = bundle

    def __enter__(self) -> WebProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, S, V] for ids [B, S], from an empty cache; an encoder reads the ids as well."""
        source = [ids] if self._bundle.reads_source else []
        with closing(self._bundle.session(*ids.shape, *source)) as session:
            return session.step(ids, np.arange(ids.shape[1]))

    def continued(self, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the likeliest next tokens of a decoder's prompts [B, S], step by step, [B, count]."""
        batch, length = prompts.shape
        with closing(self._bundle.session(batch, length + count)) as session:
            return continue_greedily(lambda ids: session.step(ids)[:, -1], prompts, count)

    def hidden(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return an encoder's last hidden state [B, S, H] for ids and mask [B, S]."""
        return self._bundle.encode(ids, mask)

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a plain module's output for its one input."""
        return self._bundle.classes(x)
