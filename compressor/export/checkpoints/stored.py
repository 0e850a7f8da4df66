"""Write the configuration and the weights of a model: as safetensors, under the names of the model's own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.capture.weights import INDEX_NAME
from compressor.host.tensor_files import DTYPES, write_safetensors

CONFIG_NAME = "config.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredModel:
    """Hold the content of a folder that will be written, by the names that the model's class has for its weights.

    Attributes:
        origin: the model's own folder.
        config: content of config.json.
        tensors: values, on the meta device in drafts.
        types: that the values are to be stored in.
        parts: of each packed weight, the tensors that are stored for it, by the last part of their names.
        files: the name of the model's file that each lies in.
        unread: names that no operator of the graph reads.
    """

    origin: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    types: Mapping[str, torch.dtype]
    parts: Mapping[str, Mapping[str, Tensor]]
    files: Mapping[str, str]
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredFiles:
    """Files that were written: SHA-256 by file, and bytes by weight."""

    hashes: Mapping[str, str]
    bytes: Mapping[str, int]


Writer = Callable[[Path, StoredModel], StoredFiles]
"""Write the configuration and the weights of a model into a folder."""


def write_safetensors_files(folder: Path, model: StoredModel) -> StoredFiles:
    """Write config.json, and each weight in a safetensors file of the name that it has in the model's folder."""
    (folder / CONFIG_NAME).write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    hashes, sizes, places = dict[str, str](), dict[str, int](), dict[str, str]()
    for file in sorted(set(model.files.values())):
        typed: dict[str, Tensor] = {}
        for name in (name for name, place in model.files.items() if place == file):
            if name in model.parts:
                base = name.removesuffix("weight")
                written = {f"{base}{part}": tensor for part, tensor in model.parts[name].items()}
            else:
                written = {name: model.tensors[name].to(model.types[name]).contiguous()}
            sizes[name] = sum(each.numel() * each.itemsize for each in written.values())
            typed |= written
        if any(tensor.is_meta for tensor in typed.values()):
            _write_holes(folder / file, typed)
        else:
            hashes[file] = write_safetensors(folder / file, typed)
        places |= dict.fromkeys(typed, file)
    _write_index(folder, places, sum(sizes.values()))
    return StoredFiles(hashes, sizes)


def _write_index(folder: Path, places: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of several files, in which of them each tensor lies; one file needs none."""
    if len(set(places.values())) > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_holes(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that takes no room on the disk: its numbers were never written."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
