"""From a compressed graph and its kernels to the files of a bundle."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compressor.codegen.lowering.compile import Library
from compressor.codegen.targets import NativeTarget
from compressor.errors import CompressorError
from compressor.export.publish import BundleParts, FasterLibrary, fill_bundle
from compressor.export.vectors import make_vectors
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.sites import ModelInfo
from compressor.pipeline.pipeline import Context
from compressor.recipe.recipe import Recipe

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


def model_facts(graph: GraphModule) -> dict[str, Any]:
    """What the manifest says of the model."""
    info: ModelInfo = graph.meta["model"]
    cache_bytes = cache_bytes_per_token(info.cache_format, info.layers, info.kv_heads, info.head_dim)
    read = {"weight_bytes_per_token": weight_bytes_per_token(graph), "cache_bytes_per_token": cache_bytes}
    return {**dataclasses.asdict(info), **read}


def _check_room(scratch: Path) -> None:
    """LLVM ends the process, without a word of where, when it cannot write its objects."""
    free = shutil.disk_usage(scratch).free
    if free < _LINKING_BYTES:
        raise CompressorError(
            f"{scratch.parent}: the folder for temporary files has {free / 1e6:.1f} MB left, and linking needs "
            f"{_LINKING_BYTES / 1e6:.0f} MB; free some space, or set TMPDIR to a folder that has more"
        )


def weight_bytes_per_token(graph: GraphModule) -> int:
    """Bytes of parameters that one token reads: all, but of a table that only an embedding uses one row."""
    total = 0
    users: dict[str, set[Any]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        users.setdefault(str(node.target), set()).update(user.target for user in node.users)
    for name, parameter in graph.named_parameters():
        size_bytes = parameter.numel() * parameter.element_size()
        only_embedding = users.get(name) == {torch.ops.aten.embedding.default}
        total += size_bytes // parameter.shape[0] if only_embedding else size_bytes
    return total
