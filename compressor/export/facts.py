"""Describe a compressed model in a manifest: the fields that bundles of all kinds share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.errors import CompressorError
from compressor.export.native import BundleParts
from compressor.export.tokenizer import write_tokenizer
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.model import ModelInfo
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import nn

    from compressor.export.web import WebParts


def stored_parameter(graph: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the kernels take; raises CompressorError when the graph lacks it."""
    try:
        return graph.get_parameter(name)
    except AttributeError as error:
        raise CompressorError(f"the kernels need the parameter {name}, which the graph does not have") from error


def write_origin(folder: Path, parts: BundleParts | WebParts) -> None:
    """The tokenizer and the lock, where there are any."""
    if parts.tokenizer is not None:
        write_tokenizer(parts.tokenizer, folder / "tokenizer.json", parts.model.get("vocab_size", 0))
    if parts.lock is not None:
        (folder / "compress.lock").write_text(parts.lock, encoding="utf-8")


def described(parts: BundleParts | WebParts) -> dict[str, Any]:
    """The fields that manifests of all kinds have."""
    return {
        "kind": parts.model["kind"],
        "model": {key: value for key, value in parts.model.items() if key not in ("kind", "source")},
        "recipe": parts.recipe,
        "calibration": parts.calibration,
        "formats": sorted({site["format"] for site in parts.sites if site.get("format")}),
        "sites": list(parts.sites),
        "kernels": list(parts.kernels),
        "versions": installed_versions(),
        "dense_weight_bytes": parts.dense_weight_bytes,
    }


def model_facts(graph: GraphModule) -> dict[str, Any]:
    """What the manifest says of the model."""
    info: ModelInfo = graph.meta["model"]
    cache_bytes = cache_bytes_per_token(info.cache_format, info.layers, info.kv_heads, info.head_dim)
    read = {"weight_bytes_per_token": weight_bytes_per_token(graph), "cache_bytes_per_token": cache_bytes}
    return {**dataclasses.asdict(info), **read}


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
