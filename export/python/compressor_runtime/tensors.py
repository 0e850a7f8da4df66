"""Read safetensors files, and lay arrays out as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import BundleError, DamagedBundleError
from compressor_runtime.manifest import LARGEST_HEADER_BYTES, MANIFEST, WEIGHTS, field, items, member, read_json
from compressor_runtime.vm import tvm_ffi

ALIGNMENT_BYTES = 64  # the kernels use aligned vector loads: an array at any other address ends the process
_TILE_ROWS = 16
_MOST_DIMENSIONS = 16  # no model has more
_DTYPES = {  # safetensors name -> numpy's
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "uint16",  # numpy has no bfloat16; the kernels take the bits
    "BOOL": "bool",
}


def read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """Map the tensors of a safetensors file into memory, by name; bfloat16 comes as its bits, uint16.

    The mapping is private: writes to the arrays do not reach the file.

    Raises:
        DamagedBundleError: the file breaks the format: header, offsets, holes, sizes, unknown dtypes.
    """
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(LARGEST_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = read_json(stream.read(header_bytes))
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, mode="c")[8 + header_bytes :]
        tensors, cursor = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, end), shape = entry["data_offsets"], entry["shape"]
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            whole = len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
            if start != cursor or not whole or end != start + math.prod(shape) * dtype.itemsize or end > data.size:
                raise ValueError(f"{name!r} has {entry['dtype']} {shape!r:.200} and offsets {start!r}, {end!r:.200}")
            tensors[name] = np.asarray(data[start:end]).view(dtype).reshape(shape)
            cursor = end
        if cursor != data.size:
            raise ValueError(f"{data.size} bytes of data, {cursor} described")
    except OSError as error:
        raise BundleError(f"{file}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedBundleError(f"{file}: not a valid safetensors file ({error}); copy the bundle again") from error
    return tensors


def read_parameters(root: Path, manifest: dict[str, Any]) -> list[NDArray[Any]]:
    """Return the parameters in the entry's order, each with the type and shape that the kernels were made for.

    The entry checks the same in every call, so an error here is only earlier.  The entry cannot check that token ids
    lie in their table, which `vocab_size` is compared with here.

    Raises:
        DamagedBundleError: a parameter is missing, or has another type or shape.
    """
    file = member(root, WEIGHTS)
    stored = read_safetensors(file)
    names = items(manifest, "parameters", str)
    stated = manifest["schema_version"] > 1 or "parameter_types" in manifest  # schema 1 did without
    types = items(manifest, "parameter_types", dict) if stated else [None] * len(names)
    if len(names) != len(types):
        raise DamagedBundleError(f"{MANIFEST}: {len(names)} `parameters`, {len(types)} `parameter_types`")
    for name, expected in zip(names, types, strict=True):
        if name not in stored:
            raise DamagedBundleError(f"{file}: lacks {name!r}; copy the bundle again")
        if expected is None:
            continue
        dtype, shape = field(expected, "dtype", str), tuple(items(expected, "shape", int))
        if dtype not in _DTYPES or _DTYPES[dtype] != stored[name].dtype or shape != stored[name].shape:
            actual = f"{stored[name].dtype} {list(stored[name].shape)}"
            raise DamagedBundleError(f"{file}: {name!r} is {actual}, the kernels take {dtype} {list(shape)}")
    tables = [rows_of(stored[name]) for name in names]
    if manifest["kind"] != "module" and manifest["model"]["vocab_size"] > max(tables, default=0):
        raise DamagedBundleError(f"{MANIFEST}: `vocab_size` exceeds the rows of every table in {WEIGHTS}")
    return [stored[name] for name in names]


def rows_of(part: NDArray[Any]) -> int:
    """Return the rows of a table of floats, or of the codes of a packed one (whole tiles); 0 of anything else."""
    if part.ndim == 2:
        return int(part.shape[0])
    is_codes = part.ndim == 4 and part.dtype == np.int32 and part.shape[3] == _TILE_ROWS
    return _TILE_ROWS * int(part.shape[0]) if is_codes else 0


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros that begin at a multiple of 64 bytes."""
    memory = np.zeros(math.prod(shape) * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % ALIGNMENT_BYTES)


def aligned_rows(rows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return copies of arrays [T], each where kernels take it as it lies: in one block, which takes less time."""
    line = ALIGNMENT_BYTES // 8
    block = aligned_zeros((len(rows), -(-max(map(len, rows)) // line) * line), np.dtype(np.int64))
    found = [place[: len(row)] for place, row in zip(block, rows, strict=True)]
    for place, row in zip(found, rows, strict=True):
        place[:] = row
    return found


def to_tvm(array: NDArray[Any]) -> Any:
    """Return the array as the kernels take it: where it lies when it is aligned and contiguous, otherwise a copy."""
    if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.c_contiguous or not array.flags.writeable:
        copy = aligned_zeros(array.shape, array.dtype)
        copy[...] = array
        array = copy
    return tvm_ffi.from_dlpack(array)
