"""Tensors in files: written one at a time, read where they lie, and their memory given back.

A tensor of a mapped file takes memory as it is read, page by page, and nothing takes these pages away again while
there is memory left.  :func:`release` does: the next read fetches them from the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compressor.errors import CompressorError, failed_write

ALIGNMENT_BYTES = 64
_PIECE_BYTES = 16 << 20
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""Types by their names in a safetensors header."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # or a file larger than memory could not be mapped

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Address -> a mapping of ours.  It is here as long as a tensor uses it, so what lies there is never anything else."""

_files: weakref.WeakValueDictionary[tuple[int, ...], mmap.mmap] = weakref.WeakValueDictionary()
"""Identity of a file -> the mapping of all of it."""


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors``, contiguous, in the official format; returns the file's SHA-256 in hexadecimal.

    The memory of tensors that lie in mapped files is given back as soon as they are written.

    The data begins at a multiple of 64 bytes, and the tensors whose size is a multiple of 64 bytes come first, so that
    a memory-mapped reader finds all of these aligned (the format allows no holes).  The rest follows by falling
    element size, which keeps every element aligned to itself.  At most one tensor is copied at a time, and only
    when it is not contiguous.  The same tensors give the same bytes, in whatever order they come.

    Raises:
        CompressorError: a tensor has a type that the format lacks, or no data.
    """
    order = sorted(
        tensors, key=lambda name: (_bytes(tensors[name]) % ALIGNMENT_BYTES != 0, -tensors[name].itemsize, name)
    )
    header, cursor = {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.is_meta:
            raise CompressorError(f"{name}: {tensor.dtype} on {tensor.device} cannot be stored in a safetensors file")
        end = cursor + _bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        head = len(text).to_bytes(8, "little") + text
        stream.write(head)
        digest.update(head)
        for name in order:
            data = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                stream.write(piece)
                digest.update(piece)
            release([tensors[name]])
    return digest.hexdigest()


def map_safetensors(file: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file into memory.

    The mapping is private: a write to a tensor copies its pages.

    The file must have been validated (``safetensors.safe_open``) or written by :func:`write_safetensors`.  A tensor at
    an address that its type does not allow is copied.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
        mapping = _map(stream.fileno(), os.fstat(stream.fileno()).st_size, mmap.MAP_PRIVATE | _NO_RESERVE)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype, shape, offset = DTYPES[entry["dtype"]], entry["shape"], 8 + header_bytes + entry["data_offsets"][0]
        if not prod(shape):
            tensors[name] = torch.empty(shape, dtype=dtype)
        elif offset % dtype.itemsize:
            raw = torch.frombuffer(mapping, dtype=torch.uint8, count=prod(shape) * dtype.itemsize, offset=offset)
            tensors[name] = raw.clone().view(dtype).view(shape)
        else:
            tensors[name] = torch.frombuffer(mapping, dtype=dtype, count=prod(shape), offset=offset).view(shape)
    return tensors


def map_file(file: Path) -> Tensor:
    """Map a whole file, uint8; once while a tensor uses it.  Writes to the tensor copy pages, and change no file.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if not stat.st_size:
            return torch.empty(0, dtype=torch.uint8)
        if key not in _files:
            _files[key] = mapping = _map(stream.fileno(), stat.st_size, mmap.MAP_PRIVATE | _NO_RESERVE)
        else:
            mapping = _files[key]
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Spill:
    """A place on disk for tensors that would take too much memory; it vanishes with the last of them."""

    def __init__(self, folder: Path, contents: str = "hidden states") -> None:
        self.folder = folder
        self.contents = contents  # for messages

    def empty(self, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros in a mapped temporary file.

        Raises:
            CompressorError: the disk has no room for it.
        """
        shape = tuple(shape)
        size_bytes = prod(shape) * dtype.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as stream:
                os.posix_fallocate(stream.fileno(), 0, size_bytes)  # a write to a hole of a full disk ends the process
                mapping = _map(stream.fileno(), size_bytes, mmap.MAP_SHARED)
        except OSError as error:
            raise failed_write(
                error,
                f"{self.folder}: no room for {size_bytes} bytes of {self.contents} ({error}); free some space, or set "
                "COMPRESS_CACHE_DIR to a folder on a larger disk",
            ) from error
        return torch.frombuffer(mapping, dtype=dtype).view(shape)


def _map(descriptor: int, size_bytes: int, flags: int) -> mmap.mmap:
    mapping = mmap.mmap(descriptor, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _mappings[torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()] = mapping
    return mapping


def release(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of those tensors that lie in files mapped here; their contents stay, in the files.

    Tensors that share a page with others may cost these a read.  A tensor that was written to keeps its memory, and
    so does everything that lies elsewhere.
    """
    spans = sorted((address, address + len(mapping)) for address, mapping in _mappings.items())
    for tensor in tensors:
        first = tensor.data_ptr()
        for begin, end in spans:
            mapping = _mappings.get(begin)
            if mapping is None or not begin <= first < end:
                continue
            start = (first - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(end, first + _bytes(tensor)) - begin
            if not _written(begin + start, stop - start):
                mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def trim() -> None:
    """Give freed memory back to the system.

    Small objects that live long lie between large ones that do not; glibc would keep the gaps, and every block of a
    model would leave new ones.
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def _written(address: int, size_bytes: int) -> bool:
    """Whether a page of these is a copy of the file's in memory (Linux, Documentation/admin-guide/mm/pagemap.rst)."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(address // mmap.PAGESIZE * 8)
        flags = np.frombuffer(pages.read(-(-size_bytes // mmap.PAGESIZE) * 8), np.uint64)
    return bool((((flags >> np.uint64(62)) > 0) & ((flags >> np.uint64(61)) % 2 == 0)).any())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
