"""Compare the files of a bundle with the sizes and SHA-256 of its manifest."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compressor_runtime.cpu import available_cores
from compressor_runtime.errors import BundleError, DamagedBundleError
from compressor_runtime.manifest import (
    LIBRARY,
    MANIFEST,
    TVM_CUDA,
    TVM_RUNTIME,
    WEIGHTS,
    field,
    is_cuda,
    items,
    libraries,
    member,
)

PIECE_BYTES = 16 << 20
"""A larger file's entry has ``pieces``, the SHA-256 of each so many bytes: threads share the work."""

_Span = tuple[Path, int, int, str]
"""File, first byte, end, SHA-256."""


def check_files(root: Path, manifest: dict[str, Any], threads: int | None = None) -> None:
    """Check that every file of the manifest is there, inside ``root``, and has the size and SHA-256 stated.

    Args:
        threads: how many share the work; None takes the physical cores.
    Raises:
        BundleError: a file cannot be read, or the bundle is for a system that has no run-time of TVM's.
        DamagedBundleError: a file is missing, or differs from the manifest.
    """
    files, own = field(manifest, "files", dict), (TVM_CUDA,) if is_cuda(manifest) else ()
    if isinstance(system := manifest.get("system"), str) and TVM_RUNTIME not in files:
        raise BundleError(
            f"{root}: holds kernels for {system:.40} and no {TVM_RUNTIME}: no wheel has TVM's run-time for it; "
            "compress again with `system: linux`"
        )
    for name in (LIBRARY, *(field(entry, "file", str) for entry in libraries(manifest)), WEIGHTS, TVM_RUNTIME, *own):
        if name not in files:
            raise DamagedBundleError(f"{root / MANIFEST}: `files` does not list {name}")
    check_listed(root, files, threads)


def check_listed(root: Path, files: dict[str, Any], threads: int | None = None) -> None:
    """As :func:`check_files`, for the ``files`` of a manifest of whatever kind."""
    spans = [span for name, entry in files.items() for span in _spans(root, name, entry)]
    with ThreadPoolExecutor(threads or available_cores(), "compressor-sha256") as pool:
        list(pool.map(lambda span: _check_span(*span), spans))


def _spans(root: Path, name: str, entry: Any) -> list[_Span]:
    """Return the pieces of a file that are compared, after a check of its size."""
    file, size_bytes, digest = member(root, name), field(entry, "bytes", int), field(entry, "sha256", str)
    try:
        actual_bytes = file.stat().st_size
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    if actual_bytes != size_bytes:
        raise DamagedBundleError(f"{file}: {actual_bytes} bytes, the manifest says {size_bytes}; copy the bundle again")
    if "pieces" not in entry:  # a small file, or an older bundle's
        return [(file, 0, size_bytes, digest)]
    starts, pieces = range(0, size_bytes, PIECE_BYTES), items(entry, "pieces", str)
    if len(starts) != len(pieces):
        raise DamagedBundleError(
            f"{root / MANIFEST}: `pieces` of {name}: {len(pieces)} of them, {size_bytes} bytes have {len(starts)} "
            f"of {PIECE_BYTES}; copy the bundle again"
        )
    ends = (min(start + PIECE_BYTES, size_bytes) for start in starts)
    return [(file, *span) for span in zip(starts, ends, pieces, strict=True)]


def _check_span(file: Path, start: int, end: int, digest: str) -> None:
    try:
        actual = sha256(file, start, end)
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    if actual != digest:
        raise DamagedBundleError(
            f"{file}: its SHA-256 is not the manifest's (bytes {start} to {end}); copy the bundle again"
        )


def sha256(file: Path, start: int = 0, end: int = sys.maxsize) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes from ``start`` to before ``end``, read through a buffer.

    A mapped file would count as this process's memory, and a disk that cannot read a page of it would end the process.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while count := stream.readinto(buffer[: max(0, end - start)]):
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()
