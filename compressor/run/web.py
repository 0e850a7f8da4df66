"""What a run makes for browsers: kernels in WGSL and WebAssembly, checked and evaluated where they run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from compressor.codegen.targets.webgpu import SIMD128, Webgpu
from compressor.codegen.web.execute_wasm import is_available
from compressor.codegen.web.execute_webgpu import adapter_name, is_software
from compressor.codegen.web.lower import WebProgram, compile_program, compile_wasm
from compressor.codegen.web.session import Engine, WebBundle
from compressor.errors import VerificationError
from compressor.export.facts import model_facts
from compressor.export.vectors import make_vectors
from compressor.export.web import WebParts, fill_web_bundle
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.run.native import Dumper
from compressor.verify.check import Check
from compressor.verify.smoke import worst_error


class WebMaker:
    """Makes and checks a bundle for browsers; the names are those of :class:`compressor.run.native.NativeMaker`."""

    timed = False  # a software adapter says nothing of the users' devices

    def __init__(self, target: Webgpu, _threads: int | None) -> None:
        self._target = target
        self._program: WebProgram | None = None
        self._wasm: tuple[WebProgram, bytes] | None = None
        self._vectors: dict[str, torch.Tensor] = {}
        self._bundles: dict[Engine, WebBundle] = {}
        can_run: dict[Engine, bool] = {
            "webgpu": target.executes(target.resolve()), "wasm": target.wasm and is_available()
        }  # fmt: skip
        self._engines = [engine for engine, can in can_run.items() if can]
        self.runs_here = bool(self._engines)
        self.schedules: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def compile(
        self, graph: GraphModule, tune: str, _pinned: Mapping[str, Mapping[str, Any]] | None, dump: Dumper
    ) -> None:
        """Generate the programs."""
        if tune == "full":
            self.notes.append(
                "tune: full changes nothing for webgpu: its kernels have the shipped constants everywhere"
            )
        info: ModelInfo = graph.meta["model"]
        if info.kind == "module":
            raise VerificationError(
                f"{info.name}: the target webgpu serves decoders and encoders, this is a plain module; take the target "
                "x86"
            )
        self._program = compile_program(graph, self._target.tvm_target(self._target.resolve()), dump(None))
        if self._target.wasm:
            self._wasm = compile_wasm(graph, SIMD128, dump(SIMD128))
        if self.runs_here:
            self._vectors = make_vectors(graph)

    def write(
        self,
        folder: Path,
        graph: GraphModule,
        recipe: Recipe,
        context: Context,
        dense_weight_bytes: int,
        lock: str,
        _independent: bool,
    ) -> dict[str, Any]:
        """All files of the bundle; returns its manifest."""
        program, info = self._program, graph.meta["model"]
        assert program is not None
        programs: dict[Engine, WebProgram] = {"webgpu": program}
        if self._wasm is not None:
            programs["wasm"] = self._wasm[0]
        constants = {name: array for one in programs.values() for name, array in one.constants.items()}
        return fill_web_bundle(
            folder,
            WebParts(
                graph=graph,
                parameters=list(dict.fromkeys(name for one in programs.values() for name in one.parameters)),
                constants={name: torch.from_numpy(array.copy()) for name, array in constants.items()},
                program=program.content,
                wasm=None if self._wasm is None else (self._wasm[0].content, self._wasm[1]),
                model=model_facts(graph),
                recipe=recipe.resolved(),
                sites=[dataclasses.asdict(record) for record in context.records],
                kernels=[
                    {**record, "engine": engine, "evidence": "executed" if engine in self._engines else "compiled"}
                    for engine, one in programs.items()
                    for record in one.kernels
                ],
                dense_weight_bytes=dense_weight_bytes,
                calibration=None if context.samples is None else context.samples.facts(),
                tokenizer=info.source,
                lock=lock,
            ),
        )

    def check(self, folder: Path) -> tuple[float, list[Check]]:
        """The kernels' largest error against the graph."""
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
            prompt, session = int(stored["prompt"][0]), bundle.session(*ids.shape)
            parts = [ids[:, :prompt], *(ids[:, [i]] for i in range(prompt, ids.shape[1]))]
            found = np.concatenate([session.step(part, np.arange(part.shape[1])) for part in parts], axis=1)
        errors = output_errors(found.reshape(-1, found.shape[-1]).astype(np.float64), stored, 0)
        return worst_error(errors, float(stored["tolerance"][0]))

    def _evaluator(self) -> Engine:
        """A software adapter is much slower than WebAssembly, which computes the same within the check's tolerance."""
        is_slow = "webgpu" not in self._engines or is_software()
        return "wasm" if "wasm" in self._engines and is_slow else "webgpu"

    def process(self, folder: Path) -> WebProcess:
        """The bundle on this machine, to be evaluated; as checked, its kernels are compiled already."""
        engine = self._evaluator()
        return WebProcess(self._bundles.get(engine) or WebBundle(folder, engine))

    def why_not(self) -> str:
        """Why nothing runs here, in words."""
        return (
            "kernels are compiled, not executed: nothing was measured; `pip install 'compressor[webgpu]'`, and where "
            "there is no graphics processor Debian's mesa-vulkan-drivers, let this machine run them"
        )


class WebProcess:
    """A bundle for evaluations, as :class:`compressor.evaluate.models.BundleProcess`."""

    def __init__(self, bundle: WebBundle) -> None:
        self._bundle = bundle

    def __enter__(self) -> WebProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, S, V] for ids [B, S], from an empty cache."""
        with closing(self._bundle.session(*ids.shape)) as session:
            return session.step(ids, np.arange(ids.shape[1]))

    def hidden(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """An encoder's last hidden state [B, S, H] for ids and mask [B, S]."""
        return self._bundle.encode(ids, mask)
