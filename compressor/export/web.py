"""Write the files of a bundle for browsers: programs, weights in shards, run-time, page."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.codegen.backend import Written
from compressor.export.facts import stored_parameter
from compressor.export.publish import explaining_failed_writes
from compressor.host.resources import resource

if TYPE_CHECKING:
    from torch import Tensor, nn

SCHEMA_VERSION = 1
SHARD_BYTES = 16 << 20
"""A shard is checked, and kept by the browser, as a whole."""
_ALIGNMENT_BYTES = 16
SHIPPED: tuple[str, ...] = (
    "runner.js", "files.js", "program.js", "webgpu.js", "wasm.js", "threads.js", "worker.js", "tune.js", "sampling.js",
    "lookup.js", "source.js", "text.js", "runner.d.ts", "index.html", "sw.js", "vendor/tokenizers.mjs",
    "vendor/LICENSE-tokenizers",
)  # fmt: skip
SHIPPED_WASM: tuple[str, ...] = (
    "runner.js",
    "files.js",
    "program.js",
    "wasm.js",
    "threads.js",
    "worker.js",
    "runner.d.ts",
)
"""The run-time of image classifiers in WebAssembly, which has neither page nor tokenizer."""


@dataclass(frozen=True, kw_only=True)
class WebParts:
    """Hold what a bundle for browsers is made of.

    Attributes:
        name: of the model, for the bundle's README.
        graph: the parameters, by name.
        parameters: names of those that the programs take.
        constants: what the programs themselves hold, by name.
        program: see :class:`compressor.codegen.web.lower.WebProgram`; None where there is WebAssembly alone.
        wasm: the program of WebAssembly, and the module.
        kernels: name, evidence, ... of each.
    """

    name: str
    graph: nn.Module
    parameters: Sequence[str]
    constants: Mapping[str, Tensor]
    program: Mapping[str, Any] | None
    wasm: tuple[Mapping[str, Any], bytes] | None
    kernels: Sequence[Mapping[str, Any]]


def write_web(folder: Path, parts: WebParts) -> Written:
    """Write programs, weights in shards, run-time, page and README into the empty ``folder``.

    Raises:
        CompressorError: a parameter is missing, or writing failed.
    """
    tensors = {name: stored_parameter(parts.graph, name).detach() for name in parts.parameters} | dict(parts.constants)
    with explaining_failed_writes(folder):
        if parts.program is None:
            _copy_runtime(folder, parts.name, SHIPPED_WASM, "README-wasm.md")
        else:
            _copy_runtime(folder, parts.name, SHIPPED, "README-bundle.md")
            _write_program(folder / "webgpu.json", parts.program)
        if parts.wasm is not None:
            program, module = parts.wasm
            (folder / "wasm").mkdir()
            _write_program(folder / "wasm" / "program.json", program)
            (folder / "wasm" / "kernels.wasm").write_bytes(module)
        places, shards = _write_shards(folder, tensors)
    programs = [program for program in (parts.program, parts.wasm and parts.wasm[0]) if program is not None]
    entries = ["main", *(name for name in ("encode", "verify") if any(name in program for program in programs))]
    fields = {
        "format": "compressor web bundle",
        "schema_version": SCHEMA_VERSION,
        "engines": [name for name, made in (("webgpu", parts.program), ("wasm", parts.wasm)) if made is not None],
        **({"entries": entries} if len(entries) > 1 else {}),
        "weights": {"shards": shards, "tensors": places},
        "weight_bytes": sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
    }
    return Written(fields, parts.kernels, {shard["file"]: shard["sha256"] for shard in shards})


def _copy_runtime(folder: Path, name: str, shipped: Sequence[str], readme_name: str) -> None:
    """Copy the run-time in JavaScript, the page if there is one, and the README."""
    web = resource("export") / "web"
    for file in shipped:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(web / file, folder / file)
    readme = string.Template((web / readme_name).read_text(encoding="utf-8"))
    (folder / "README.md").write_text(readme.substitute(name=name), encoding="utf-8")


def _write_program(path: Path, program: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(program, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")


def _write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Where each tensor lies in all shards together, and the shards."""
    from compressor.host.tensor_files import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    places, offset = {}, 0
    for name, tensor in tensors.items():
        size_bytes = tensor.numel() * tensor.itemsize
        shape = list(tensor.shape)
        places[name] = {"offset": offset, "bytes": size_bytes, "dtype": names[tensor.dtype], "shape": shape}
        offset += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    shards: list[dict[str, Any]] = []
    (folder / "weights").mkdir()
    for number, content in enumerate(_shards(_contents(tensors))):
        file = f"weights/{number:04d}.bin"
        (folder / file).write_bytes(content)
        shards.append({"file": file, "bytes": len(content), "sha256": sha256(content).hexdigest()})
    return places, shards


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Bytes of one tensor after another, each filled up to a multiple of the alignment."""
    import torch

    for tensor in tensors.values():
        content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        yield content
        yield memoryview(bytes(-len(content) % _ALIGNMENT_BYTES))


def _shards(contents: Iterator[memoryview]) -> Iterator[bytes]:
    shard = bytearray()
    for content in contents:
        while len(content):
            taken = content[: SHARD_BYTES - len(shard)]
            shard += taken
            content = content[len(taken) :]
            if len(shard) == SHARD_BYTES:
                yield bytes(shard)
                shard.clear()
    if shard:
        yield bytes(shard)
