"""Open a ``.pt2`` archive: its program as JSON, its tensors as views of the mapped file.

``torch.export.load`` unpickles example inputs (and some weights and constants) and gives texts of the program to sympy,
which evaluates them; either can run code.  This reader takes the program's JSON and raw tensors alone.
"""

from __future__ import annotations

import json
import math
import mmap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import CaptureError

_LARGEST_JSON_BYTES, _MOST_FILES = 256 << 20, 1 << 20
_SCHEMA = 8  # of torch 2.13
_LOCAL_HEADER_BYTES = 30  # before the name and the extra field in front of each file
_ADVICE = "export the module again with torch.export.save, on the CPU"
_TYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class Archive:
    """An archive's content.

    Attributes:
        program: the exported program, plain data as JSON gives it, unchecked.
        tensors: by name: parameters (as such), buffers and constants; tied ones are one object.
    """

    program: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_archive(path: Path) -> Archive:
    """Read an archive of one program.

    Args:
        path: the file, as ``torch.export.save`` of torch 2.13 writes it.
    Raises:
        CaptureError: it is something else, damaged, or holds what only unpickling could read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise CaptureError(f"{path}: not an archive of torch.export, or damaged ({error!s:.120}); {_ADVICE}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CaptureError(f"{path}: not as torch.export writes it ({error!r:.120}); {_ADVICE}") from error


def scalar_type(number: object) -> torch.dtype:
    """Return the type that a program means by a number.

    Raises:
        ValueError: there is none that the graph could hold.
    """
    if type(number) is not int or number not in _TYPES:
        raise ValueError(f"type number {number!r:.40}")
    return _TYPES[number]


def _read(archive: zipfile.ZipFile, path: Path) -> Archive:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()) or len(entries) > _MOST_FILES:
        raise ValueError("files of one name, or too many")
    if "archive_format" not in entries or archive.read(entries["archive_format"]).strip() != b"pt2":
        raise CaptureError(f"{path}: not an archive of torch.export (a checkpoint or a TorchScript file?); {_ADVICE}")
    order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
    models = [name for name in entries if name.startswith("models/") and name.endswith(".json")]
    if len(models) != 1 or order != b"little":
        raise CaptureError(
            f"{path}: holds {len(models)} programs, {order!r:.20} byte order; wanted: one, little endian"
        )
    model = models[0].removeprefix("models/").removesuffix(".json")
    program = _json(archive, entries[models[0]])
    if program["schema_version"]["major"] != _SCHEMA:
        raise CaptureError(f"{path}: written by torch {program.get('torch_version')!r:.30}, in another form; {_ADVICE}")
    tensors: dict[str, Tensor] = {}
    for folder, kind in (("data/weights/", "weights"), ("data/constants/", "constants")):
        config = entries.get(f"{folder}{model}_{kind}_config.json")
        if config is None:
            raise CaptureError(f"{path}: its {kind} are pickled, which can run code when loaded; {_ADVICE}")
        tensors |= _tensors(archive, path, folder, _json(archive, config)["config"], entries)
    return Archive(program, tensors)


def _json(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    if entry.file_size > _LARGEST_JSON_BYTES:
        raise ValueError(f"{entry.filename} has {entry.file_size} bytes")
    return json.loads(archive.read(entry))


def _tensors(
    archive: zipfile.ZipFile,
    path: Path,
    folder: str,
    config: Mapping[str, Any],
    entries: Mapping[str, zipfile.ZipInfo],
) -> dict[str, Tensor]:
    """Map the tensors that one of the archive's lists names."""
    found: dict[str, Tensor] = {}
    made: dict[tuple[Any, ...], Tensor] = {}
    with path.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for name, entry in config.items():
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise CaptureError(f"{path}: {name} is pickled, which can run code when loaded; leave it out of the module")
        meta = entry["tensor_meta"]
        sizes, strides = ([_whole(size) for size in meta[key]] for key in ("sizes", "strides"))
        offset, dtype = _whole(meta["storage_offset"]), scalar_type(meta["dtype"])
        key = (entry["path_name"], dtype, tuple(sizes), tuple(strides), offset, entry["is_param"])
        if key not in made:
            tensor = _view(mapping, entries[folder + entry["path_name"]], dtype, sizes, strides, offset)
            parameter = entry["is_param"] and tensor.is_floating_point()
            made[key] = nn.Parameter(tensor, False) if parameter else tensor
        found[name] = made[key]
    return found


def _view(
    mapping: mmap.mmap, entry: zipfile.ZipInfo, dtype: torch.dtype, sizes: list[int], strides: list[int], offset: int
) -> Tensor:
    """Return a tensor over the bytes of one file of the archive."""
    if len(sizes) != len(strides):
        raise ValueError(f"{entry.filename}: {len(sizes)} sizes and {len(strides)} strides")
    count = entry.file_size // dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    if entry.compress_type != zipfile.ZIP_STORED or last >= count:
        raise ValueError(f"{entry.filename}: compressed, or too short for its tensor")
    header = mapping[entry.header_offset : entry.header_offset + _LOCAL_HEADER_BYTES]
    begin = (
        entry.header_offset + _LOCAL_HEADER_BYTES + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    )
    if begin + entry.file_size > len(mapping):
        raise ValueError(f"{entry.filename}: goes on behind the end of the file")
    flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin)
    return flat.as_strided(sizes, strides, offset)


def _whole(value: Mapping[str, Any]) -> int:
    number = value["as_int"]
    if type(number) is not int or not 0 <= number < 1 << 48:
        raise ValueError(f"size {number!r:.40}")
    return number
