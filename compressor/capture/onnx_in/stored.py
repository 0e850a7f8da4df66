"""Find the weights in an ONNX file without reading them.

    model.onnx  =  ... graph { node, node, initializer { name, dims, raw_data }, ... }
                becomes a model without those raw_data, and the place of each in the file

An ONNX file is one protobuf message.  Parsing it would copy every weight, so the message is walked
(https://protobuf.dev/programming-guides/encoding/), and what lies in the file or beside it is mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compressor.errors import ModelFileError
from compressor.host.tensor_files import map_file

if TYPE_CHECKING:
    from onnx import TensorProto

_GRAPH, _INITIALIZER, _NAME, _RAW = 7, 5, 8, 9  # fields of ModelProto, GraphProto and TensorProto
_SMALLEST_BYTES = 1024  # smaller tensors stay in the message
_LARGEST_MESSAGE_BYTES = 1 << 30
# TensorProto.DataType -> type; tensors of strings and of complex numbers are refused.
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 16: torch.bfloat16,
    17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz, 19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip
# Types of less than a byte, unpacked to the type behind them; only DequantizeLinear reads them.
NARROW = {21: torch.uint8, 22: torch.int8, 23: torch.float32, 25: torch.uint8, 26: torch.int8}


@dataclass(frozen=True)
class Place:
    """Bytes of a file."""

    file: Path
    offset: int
    size_bytes: int


def strip_weights(file: Path) -> tuple[bytes, dict[str, Place]]:
    """Return an ONNX file's message without its larger ``raw_data``, and where these are, by initializer.

    Raises:
        ModelFileError: it is not a protobuf message, or too large without its weights.
        OSError: it cannot be read.
    """
    places: dict[str, Place] = {}
    if not file.stat().st_size:
        raise ModelFileError(f"{file}: not an ONNX file: it is empty; fetch it again")
    data = map_file(file).numpy().data
    message, left = bytearray(), 0
    try:
        for field, start, begin, end in _fields(data, 0, len(data)):
            if field != _GRAPH:
                message += data[start:end]
                continue
            graph = bytearray()
            for inner, inner_start, inner_begin, inner_end in _fields(data, begin, end):
                tensor = _strip_tensor(file, data, inner_begin, inner_end, places) if inner == _INITIALIZER else None
                graph += data[inner_start:inner_end] if tensor is None else _message(_INITIALIZER, tensor)
                left = len(message) + len(graph)
                if left > _LARGEST_MESSAGE_BYTES:
                    raise ModelFileError(
                        f"{file}: more than {_LARGEST_MESSAGE_BYTES >> 20} MiB besides weights; store its weights as "
                        "initializers with raw_data (onnx.save does)"
                    )
            message += _message(_GRAPH, graph)
    except (IndexError, ValueError) as error:
        raise ModelFileError(f"{file}: not an ONNX file, or cut short ({error}); fetch it again") from error
    return bytes(message), places


def read_tensor(proto: TensorProto, place: Place | None) -> Tensor:
    """Return an initializer: a view of the mapped file where its elements are aligned there, else a copy.

    Raises:
        ModelFileError: its type has no tensors here, or its bytes are too few or too many.
    """
    from onnx import numpy_helper

    shape, kind = list(proto.dims), proto.data_type
    if kind in NARROW:
        if place is not None:
            proto.raw_data = bytes(map_file(place.file)[place.offset : place.offset + place.size_bytes].numpy().data)
        narrow = numpy_helper.to_array(proto)
        return torch.from_numpy(narrow.astype(str(NARROW[kind]).removeprefix("torch.")))
    if kind not in DTYPES:
        from onnx import TensorProto

        name = TensorProto.DataType.Name(kind) if kind in TensorProto.DataType.values() else str(kind)
        raise ModelFileError(f"{proto.name!r} holds {name.lower()} values; numbers and booleans are read")
    dtype, count = DTYPES[kind], prod(shape)
    if place is None and proto.HasField("raw_data"):
        raw = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.uint8) if proto.raw_data else torch.empty(0)
    elif place is None:
        values = numpy_helper.to_array(proto)
        if values.dtype.name in ("bfloat16",) or values.dtype.name.startswith("float8"):
            raw = torch.from_numpy(values.reshape(-1).view("uint8").copy())
        else:
            return torch.from_numpy(values.copy()).reshape(shape)
    else:
        raw = map_file(place.file)[place.offset : place.offset + place.size_bytes]
    if raw.numel() != count * dtype.itemsize:
        raise ModelFileError(f"{proto.name!r} has {raw.numel()} bytes, and its shape {shape} needs "
                             f"{count * dtype.itemsize}; fetch the file again")  # fmt: skip
    if not count:
        return torch.empty(shape, dtype=dtype)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype).view(shape)


def _strip_tensor(file: Path, data: memoryview, begin: int, end: int, places: dict[str, Place]) -> bytearray | None:
    """Return a TensorProto without its raw_data, whose place is noted; None where it stays as it is."""
    kept, name, place = bytearray(), "", None
    for field, start, inner, stop in _fields(data, begin, end):
        if field == _RAW and stop - inner >= _SMALLEST_BYTES:
            place = Place(file, inner, stop - inner)
            continue
        if field == _NAME:
            name = bytes(data[inner:stop]).decode()
        kept += data[start:stop]
    if place is None or not name or name in places:
        return None
    places[name] = place
    return kept


def _fields(data: memoryview, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a message: its number, where it starts, where its content starts, and where it ends."""
    cursor = begin
    while cursor < end:
        tag, inner = _varint(data, cursor)
        kind = tag & 7
        if kind == 0:
            stop = _varint(data, inner)[1]
        elif kind == 2:
            size, inner = _varint(data, inner)
            stop = inner + size
        elif kind in (1, 5):
            stop = inner + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"byte {cursor} begins no field")
        if stop > end or not tag >> 3:
            raise ValueError(f"a field at byte {cursor} ends beyond its message")
        yield tag >> 3, cursor, inner, stop
        cursor = stop


def _varint(data: memoryview, cursor: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[cursor]
        value |= (byte & 127) << shift
        cursor, shift = cursor + 1, shift + 7
        if byte < 128:
            return value, cursor
        if shift > 63:
            raise ValueError(f"byte {cursor} belongs to no number")


def _message(field: int, content: bytearray) -> bytes:
    head, size = bytearray([field << 3 | 2]), len(content)
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head + bytes([size]) + content)
