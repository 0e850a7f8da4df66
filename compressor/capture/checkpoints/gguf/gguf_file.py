"""Read and write GGUF files (llama.cpp): metadata and tensors; every size that is read is held against the file's.

    "GGUF", version u32 (2 or 3), tensors u64, entries u64
    entries: key, type u32, value;  a string is its length u64 and UTF-8;  an array its type u32, count u64, elements
    tensors: name, dimensions u32, each u64 (the fastest first), type u32, offset u64 from the beginning of the data
    the data begins at the next multiple of ``general.alignment`` (32)

Source: ggml, ``docs/gguf.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from compressor.capture.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from compressor.errors import UsageError
from compressor.host.tensor_files import map_file, release

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
          11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
          19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
          28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
          41: "Q1_0", 42: "Q2_0"}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UINT32, _INT32, _FLOAT32, _BOOL = 4, 5, 6, 7
_ALIGNMENT_BYTES = 32
_MOST_ELEMENTS, _MOST_TENSORS, _MOST_DIMENSIONS = 1 << 22, 1 << 20, 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its type's name, its shape as torch counts dimensions, and its bytes."""

    type: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds the values: the stored one, or float32 for blocks."""
        return PLAIN_TYPES.get(self.type, torch.float32)


class _Cursor:
    """A place in the file; nothing is read beyond its end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def refuse(self, problem: str) -> NoReturn:
        raise UsageError(f"{self.path}: not a readable GGUF file: {problem}; fetch it again")

    def take(self, format_: str) -> Any:
        end = self.at + struct.calcsize(f"<{format_}")
        if end > len(self.data):
            self.refuse(f"it ends at byte {len(self.data)}, within its header: it is truncated")
        values = struct.unpack_from(f"<{format_}", self.data, self.at)
        self.at = end
        return values[0] if len(values) == 1 else values

    def count(self, most: int, what: str) -> int:
        number: int = self.take("Q")
        if number > most or number > len(self.data) - self.at:
            self.refuse(f"{number} {what} at byte {self.at - 8}, in a file of {len(self.data)} bytes")
        return number

    def text(self) -> str:
        length = self.count(len(self.data), "bytes of text")
        self.at += length
        try:
            return bytes(self.data[self.at - length : self.at]).decode()
        except UnicodeDecodeError:
            self.refuse(f"the text at byte {self.at - length} is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.take("I"), self.count(_MOST_ELEMENTS, "elements")
            if element == _STRING:
                return [self.text() for _ in range(count)]
            if element not in _SCALARS:
                self.refuse(f"an array of the type {element}")
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self.raw(count, _SCALARS[element])))
        if kind not in _SCALARS:
            self.refuse(f"a value of the type {kind}")
        return self.take(_SCALARS[kind])

    def raw(self, count: int, element: str) -> memoryview:
        size = count * struct.calcsize(f"<{element}")
        if self.at + size > len(self.data):
            self.refuse(f"it ends at byte {len(self.data)}, within an array of its header: it is truncated")
        self.at += size
        return self.data[self.at - size : self.at]


@dataclass(frozen=True)
class GgufFile:
    """A mapped GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: Tensor  # uint8, the whole file
    header_bytes: int

    def bytes_of(self, name: str) -> Tensor:
        """Return a tensor's bytes where they lie, uint8."""
        tensor = self.tensors[name]
        return self.data[tensor.begin : tensor.begin + tensor.size_bytes]


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its header.

    Raises:
        UsageError: it is truncated, not a GGUF file of version 2 or 3, or has a tensor of a type that is not covered.
    """
    try:
        data = map_file(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); fetch it again") from error
    cursor = _Cursor(path, data.numpy().data)
    if bytes(cursor.data[:4]) != b"GGUF":
        cursor.refuse("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        cursor.refuse(f"version {version}; 2 and 3 in little endian are read")
    tensor_count, entry_count = cursor.count(_MOST_TENSORS, "tensors"), cursor.count(_MOST_ELEMENTS, "entries")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        if key in metadata:
            cursor.refuse(f"{key!r:.80} comes twice")
        metadata[key] = cursor.value(cursor.take("I"))
    heads = [_tensor_head(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.refuse(f"general.alignment is {alignment!r:.40}, not a power of 2")
    header_bytes, start = cursor.at, -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in heads:
        if name in tensors:
            cursor.refuse(f"{name!r:.80} comes twice")
        tensors[name] = _placed(cursor, name, shape, number, offset, start)
    return GgufFile(path, metadata, tensors, data, header_bytes)


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.take("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        cursor.refuse(f"{name!r:.80} has {dimensions} dimensions")
    shape = tuple(cursor.take("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.take("I"), cursor.take("Q")


def _placed(cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> GgufTensor:
    kind = _TYPES.get(number, f"number {number}")
    block = BLOCK_TYPES.get(kind)
    if block is None and kind not in PLAIN_TYPES:
        raise UsageError(
            f"{cursor.path}: {name!r:.80} has the type {kind}, which is not read; read are "
            f"{', '.join([*PLAIN_TYPES, *BLOCK_TYPES])}: give a file of these types or the unquantised model"
        )
    elements, size = (block.elements, block.block_bytes) if block else (1, PLAIN_TYPES[kind].itemsize)
    if not prod(shape) or shape[-1] % elements:
        cursor.refuse(f"{name!r:.80} has the shape {list(shape)}, and {kind} has blocks of {elements}")
    size_bytes = prod(shape) // elements * size
    end = start + offset + size_bytes
    if end > len(cursor.data):
        cursor.refuse(f"{name!r:.80} ends at byte {end}, and the file at {len(cursor.data)}: it is truncated")
    if (start + offset) % PLAIN_TYPES.get(kind, torch.uint8).itemsize:
        cursor.refuse(f"{name!r:.80} lies at byte {start + offset}, which {kind} does not allow")
    return GgufTensor(kind, shape, start + offset, size_bytes)


@dataclass(frozen=True)
class GgufContent:
    """A tensor to be written: its type's name, its shape as torch counts dimensions, and what gives its bytes.

    ``read`` returns a tensor of any type with these bytes, or one on the meta device, which leaves a hole in the file.
    """

    type: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, without those that align the next tensor."""
        block = BLOCK_TYPES.get(self.type)
        elements, size = (block.elements, block.block_bytes) if block else (1, PLAIN_TYPES[self.type].itemsize)
        return prod(self.shape) // elements * size


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufContent]) -> str:
    """Write a file of version 3; one tensor at a time is in memory.

    Args:
        metadata: texts, whole numbers (u32), floats (f32), truth values, and lists of one of these, of
            whole numbers as i32.
    Returns:
        SHA-256 of the file in hexadecimal, of what was written around holes.
    """
    numbers = {name: number for number, name in _TYPES.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _valued(value) for key, value in metadata.items())
    offset = 0
    for name, content in tensors.items():
        axes = content.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, numbers[content.type], offset)
        offset += content.size_bytes + -content.size_bytes % _ALIGNMENT_BYTES
    digest = hashlib.sha256()
    with path.open("wb") as stream:

        def put(data: Any) -> None:
            stream.write(data)
            digest.update(data)

        put(head + bytes(-len(head) % _ALIGNMENT_BYTES))
        for content in tensors.values():
            tensor = content.read()
            if tensor.is_meta:
                stream.seek(content.size_bytes, 1)
            else:
                put(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                release([tensor])
            put(bytes(-content.size_bytes % _ALIGNMENT_BYTES))
        stream.truncate()
    return digest.hexdigest()


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _valued(value: Any) -> bytes:
    """Return a value behind its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, list):
        if not value or isinstance(value[0], str):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
        element, code = (_FLOAT32, "f") if isinstance(value[0], float) else (_INT32, "i")
        return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, element, len(value), *value)
    kind = _BOOL if isinstance(value, bool) else _FLOAT32 if isinstance(value, float) else _UINT32
    return struct.pack(f"<I{_SCALARS[kind]}", kind, value)
