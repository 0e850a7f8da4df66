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

    def run(self, inputs: Mapping[str, Any], sizes: Mapping[str, int], entry: str = "main") -> Any:
        """Run all steps of an entry on buffers by the inputs' names and return the output's buffer."""

    def encode(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Run the steps of ``encode``, and return copies of its outputs' buffers, by name."""


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

    @property
    def reads_source(self) -> bool:
        """Tell whether it is an encoder-decoder."""
        return "encode" in self._program.content

    @property
    def verifies(self) -> bool:
        """Tell whether the program has kernels that verify drafted tokens."""
        return "verify" in self._program.content

    def encode(self, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float32]:
        """Return an encoder's last hidden state float32 [B, S, H] for ids and mask [B, S]."""
        return encode(self._program, ids, mask)

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the output of a module of one input [N, ...]."""
        (given,) = self._program.content["inputs"]
        sizes = {name: size for name, size in zip(given["shape"], x.shape, strict=True) if isinstance(name, str)}
        return _outputs(self._program, {given["name"]: self._program.upload(x)}, {}, sizes)

    def session(
        self, batch: int, capacity: int, source: NDArray[Any] | None = None, source_mask: NDArray[Any] | None = None
    ) -> Session:
        """Start a new sequence of tokens per batch entry, of at most ``capacity`` tokens.

        Args:
            source, source_mask: of an encoder-decoder, [batch, N]: encoded here, once.
        """
        return Session(self._program, batch, capacity, source, source_mask)


def encode(program: Program, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float32]:
    """Return the last hidden state float32 [B, S, H] of an encoder's program for ids and mask [B, S]."""
    types = {x["name"]: x["dtype"] for x in program.content["inputs"]}
    given = {"ids": ids, "mask": mask}
    inputs = {name: program.upload(x.astype(types[name])) for name, x in given.items()}
    sizes = dict(zip("BS", ids.shape, strict=True))
    return _outputs(program, inputs, {}, sizes)


def encode_source(program: Program, source: NDArray[Any], mask: NDArray[Any]) -> dict[str, Any]:
    """Run an encoder on a source and its mask [B, N]; return what its decoder's steps read, by name."""
    entry = program.content["encode"]
    types = {x["name"]: x["dtype"] for x in entry["inputs"]}
    given = {"source": source, "source_mask": mask}
    inputs = {name: program.upload(given[name].astype(dtype)) for name, dtype in types.items()}
    sizes = dict(zip("BN", source.shape, strict=True))
    found = program.encode(inputs, sizes)
    kept = {"source_mask": inputs.pop("source_mask")}
    for buffer in inputs.values():
        program.free(buffer)
    return kept | found


class Session:
    """A sequence of tokens per batch entry, with the interface of ``compressor_runtime.Session``."""

    def __init__(
        self,
        program: Program,
        batch: int,
        capacity: int,
        source: NDArray[Any] | None = None,
        source_mask: NDArray[Any] | None = None,
    ) -> None:
        self._program, self._batch, self._capacity = program, batch, capacity
        self.position = 0
        names = {"B": batch, "T": capacity}
        self._memory: dict[str, Any] = {}  # of a source: what steps read of it
        self._source_sizes: dict[str, int] = {}
        if source is not None:
            mask = np.ones(source.shape, np.float32) if source_mask is None else source_mask
            self._source_sizes = {"N": source.shape[1]}
            self._memory = encode_source(program, source, mask)
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
        sizes = {"B": self._batch, "S": count, "R": len(kept), "T": self._capacity, **self._source_sizes}
        self.position += count
        return _outputs(self._program, inputs, {**self._caches, **self._memory}, sizes)

    def verify(self, ids: NDArray[Any]) -> NDArray[np.float32]:
        """Append tokens [B, S] as chains of drafts that are accepted; return the logits float32 [B, S, V]."""
        batch, count = ids.shape
        order, own = np.arange(batch * count), np.tile(np.arange(count), batch)
        at = self.position + own
        given = {"ids": ids.reshape(1, -1), "position": at, "keep": order, "row": at}
        given |= {"parent": np.where(own > 0, order - 1, -1), "slot": order // count}
        types = {x["name"]: x["dtype"] for x in self._program.content["verify"]["inputs"]}
        inputs = {name: self._program.upload(x.astype(types[name])) for name, x in given.items()}
        sizes = {"B": batch, "S": batch * count, "R": batch * count, "T": self._capacity}
        out = self._program.run({**inputs, **self._caches}, sizes, "verify")
        shape = [evaluate(n, sizes) for n in self._program.content["verify"]["output_shape"]]
        found = self._program.read(out, "float32", shape)
        for buffer in inputs.values():
            self._program.free(buffer)
        self.position += count
        return found.reshape(batch, count, -1)

    def close(self) -> None:
        """Free the memory of the caches and of the source."""
        for buffer in (*self._caches.values(), *self._memory.values()):
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
