"""Digests that say whether something is still what it was: files, models, tensors, source code.

Hashing a large model takes longer than anything else that a run does before its first pass, so the digests of large
files are kept in the cache folder, under all that the file system knows of a file without reading it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from compressor.errors import CompressorError
from compressor.host.cache import cache_folder, merge_entries, read_entries
from compressor.host.resources import PACKAGE

if TYPE_CHECKING:
    from torch import Tensor

_STORE = "fingerprints.json"
_PIECE_BYTES = 1 << 20
_WORTH_KEEPING_BYTES = 1 << 20  # smaller files are read faster than the store
_SETTLED_NS = 2_000_000_000  # two changes within a tick of the file system's clock leave the same times

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "*token*",  # tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json
    "*vocab*",
    "merges.txt",
    "*.model",  # sentencepiece
)


def read_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read now and in pieces.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return a file's hexadecimal SHA-256, from the cache folder when the file did not change since it was last read.

    A file counts as unchanged when its place, inode, size and both times are the same.  What was written to within the
    last two seconds is not remembered.  A store that cannot be written costs time only.

    Raises:
        OSError: it cannot be read.
    """
    path = path.resolve()
    before = _identity(path)
    if before[0] < _WORTH_KEEPING_BYTES:
        return read_sha256(path)
    store = cache_folder() / _STORE
    match read_entries(store).get(str(path)):
        case {"identity": list(identity), "sha256": str(known)} if identity == before and len(known) == 64:
            return known
    digest = read_sha256(path)
    settled = time.time_ns() - max(before[2], before[3]) > _SETTLED_NS
    if settled and _identity(path) == before:
        with contextlib.suppress(OSError):  # the next run reads the file again
            merge_entries(store, {str(path): {"identity": before, "sha256": digest}}, keep=os.path.exists)
    return digest


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def model_fingerprint(folder: Path, trust_remote_code: bool = False) -> dict[str, str]:
    """Name in the folder -> SHA-256 of every file that decides what is captured: configuration, weights, tokenizer.

    Args:
        folder: a Hugging Face folder, or one file that holds the model.
        trust_remote_code: the model's code counts too.
    Raises:
        OSError: a file cannot be read.
    """
    if folder.is_file():
        return {folder.name: file_sha256(folder)}
    files = {file for pattern in _MODEL_FILES for file in folder.glob(pattern)}
    if trust_remote_code:
        files.update(folder.rglob("*.py"))
    named = {os.path.relpath(file, folder).replace(os.sep, "/"): file for file in files if os.path.isfile(file)}
    return {name: file_sha256(named[name]) for name in sorted(named)}


def tensors_sha256(items: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors: names, types, shapes and contents, in the order of the names.

    One tensor at a time is copied, and only when it is not contiguous.

    Raises:
        CompressorError: a tensor has no data.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(items, key=lambda item: item[0]):
        if tensor.is_meta:
            raise CompressorError(f"{name}: has a shape and no data; load the model's weights first")
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of this package's source code and of the run-time that bundles get."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    sources = {name: path for name, path in files.items() if not name.startswith("_data/")}  # copies, in a wheel
    for module in ("compressor_runtime", "compressor_selfcheck"):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            origin = Path(found.origin)
            package = found.submodule_search_locations is not None
            for path in origin.parent.rglob("*.py") if package else [origin]:
                sources[f"{module}/{path.relative_to(origin.parent).as_posix()}"] = path
    lines = [f"{name} {read_sha256(sources[name])}\n" for name in sorted(sources)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest(*parts: object) -> str:
    """Return the SHA-256 of plain data."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
