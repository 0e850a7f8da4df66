"""Run bundles for browsers from Python: sequences of tokens through a program, on either engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from compressor.codegen.web.execute_wasm import WasmProgram
from compressor.codegen.web.execute_webgpu import GpuProgram
from compressor.codegen.web.kernel import evaluate

Engine = Literal["webgpu", "wasm"]


class Program(Protocol):
    """A program with its parameters on the engine that runs it; a buffer is opaque to others."""

    content: Mapping[str, Any]

    def empty(self, size_bytes: int) -> Any:
        """Make a buffer of zeros."""

    def upload(self, array: NDArray[Any]) -> Any:
        """Copy an array into a new buffer."""

    def free(self, buffer: Any) -> None:
        """Free a buffer."""

    def read(self, buffer: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        """Return a copy of a buffer's content as an array."""

    def run(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        """Run all steps on buffers by the inputs' names and return the output's buffer."""


class WebBundle:
    """A bundle for browsers, run on this machine.

    Args:
        engine: ``webgpu``, on this machine's adapter, or ``wasm``.
    """

    def __init__(self, folder: Path, engine: Engine = "webgpu") -> None:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        weights, types = manifest["weights"], manifest["weights"]["tensors"]
        content = np.concatenate([np.fromfile(folder / shard["file"], np.uint8) for shard in weights["shards"]])
        tensors = {name: content[t["offset"] : t["offset"] + t["bytes"]] for name, t in types.items()}
        is_gpu = engine == "webgpu"
        file = folder / ("webgpu.json" if is_gpu else "wasm/program.json")
        program = json.loads(file.read_text(encoding="utf-8"))
        self._program: Program = (
            GpuProgram(program, tensors)
            if is_gpu
            else WasmProgram(program, (folder / "wasm" / "kernels.wasm").read_bytes(), tensors)
        )

    def encode(self, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float32]:
        """Return an encoder's last hidden state float32 [B, S, H] for ids and mask [B, S]."""
        return encode(self._program, ids, mask)

    def session(self, batch: int, capacity: int) -> Session:
        """Start a new sequence of tokens per batch entry, of at most ``capacity`` tokens."""
        return Session(self._program, batch, capacity)


def encode(program: Program, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float32]:
    """Return the last hidden state float32 [B, S, H] of an encoder's program for ids and mask [B, S]."""
    types = {x["name"]: x["dtype"] for x in program.content["inputs"]}
    given = {"ids": ids, "mask": mask}
    inputs = {name: program.upload(x.astype(types[name])) for name, x in given.items()}
    sizes = dict(zip("BS", ids.shape, strict=True))
    return _outputs(program, inputs, {}, sizes)


class Session:
    """A sequence of tokens per batch entry, with the interface of ``compressor_runtime.Session``."""

    def __init__(self, program: Program, batch: int, capacity: int) -> None:
        self._program, self._batch, self._capacity = program, batch, capacity
        self.position = 0
        names = {"B": batch, "T": capacity}
        inputs = program.content["inputs"]
        self._types = {x["name"]: x["dtype"] for x in inputs}
        shapes = {x["name"]: x["shape"] for x in inputs if "_cache_" in x["name"]}
        self._caches = {
            name: program.empty(4 * int(np.prod([evaluate(n, names) for n in shape]))) for name, shape in shapes.items()
        }

    def step(self, ids: Any, keep: Any = None) -> NDArray[np.float32]:
        """Append tokens and return logits float32 [B, R, V] of those with the indices ``keep``, by default of the
        last.
        """
        tokens = np.asarray(ids).reshape(self._batch, -1)
        count = tokens.shape[1]
        kept = np.asarray([count - 1] if keep is None else keep)
        position = np.arange(self.position, self.position + count)
        given = {"ids": tokens, "position": position, "keep": kept}
        inputs = {name: self._program.upload(x.astype(self._types[name])) for name, x in given.items()}
        sizes = {"B": self._batch, "S": count, "R": len(kept), "T": self._capacity}
        self.position += count
        return _outputs(self._program, inputs, self._caches, sizes)

    def close(self) -> None:
        """Free the caches' memory."""
        for buffer in self._caches.values():
            self._program.free(buffer)


def _outputs(
    program: Program, inputs: Mapping[str, Any], caches: Mapping[str, Any], sizes: Mapping[str, int]
) -> NDArray[np.float32]:
    """Run a program, return its output and free the inputs."""
    out = program.run({**inputs, **caches}, sizes)
    found = program.read(out, "float32", [evaluate(n, sizes) for n in program.content["output_shape"]])
    for buffer in inputs.values():
        program.free(buffer)
    return found
