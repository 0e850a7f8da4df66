"""Writes safetensors files one tensor at a time, laid out for use where they lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compressor.errors import CompressorError

ALIGNMENT_BYTES = 64
_PIECE_BYTES = 16 << 20
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors``, contiguous, in the official format; returns the file's SHA-256 in hexadecimal.

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
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
