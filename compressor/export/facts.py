"""Describe a compressed model in a manifest: the fields that bundles of all kinds share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.errors import CompressorError
from compressor.export.tokenizer import write_tokenizer
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.model import ModelInfo
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """What bundles of all kinds are made of.  Everything here must be the same in two runs with the same inputs.

    Attributes:
        graph: the parameters, by name; they may be memory-mapped, or views.
        parameters: names, in the order in which the kernels' entry takes them.
        model: fields of ModelInfo; ``source`` is left out.
        recipe: after defaults and overrides.
        sites: site, format, bytes_before, bytes_after, ... of each record.
        kernels: name, evidence, ... of each.
        dense_weight_bytes: of the model before any pass.
        calibration: source, samples, tokens and SHA-256 of the calibration data.
        tokenizer: folder of the model; None for a model without text.
        lock: text of compress.lock.
    """

    graph: nn.Module
    parameters: Sequence[str]
    model: Mapping[str, Any]
    recipe: Mapping[str, Any]
    sites: Sequence[Mapping[str, Any]]
    kernels: Sequence[Mapping[str, Any]]
    dense_weight_bytes: int
    calibration: Mapping[str, Any] | None = None
    tokenizer: Path | None = None
    lock: str | None = None


def stored_parameter(graph: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the kernels take; raises CompressorError when the graph lacks it."""
    try:
        return graph.get_parameter(name)
    except AttributeError as error:
        raise CompressorError(f"the kernels need the parameter {name}, which the graph does not have") from error


def write_origin(folder: Path, facts: BundleFacts) -> None:
    """The tokenizer and the lock, where there are any."""
    if facts.tokenizer is not None:
        write_tokenizer(facts.tokenizer, folder / "tokenizer.json", facts.model.get("vocab_size", 0))
    if facts.lock is not None:
        (folder / "compress.lock").write_text(facts.lock, encoding="utf-8")


def described(facts: BundleFacts) -> dict[str, Any]:
    """The fields that manifests of all kinds have."""
    return {
        "kind": facts.model["kind"],
        "model": {key: value for key, value in facts.model.items() if key not in ("kind", "source")},
        "recipe": facts.recipe,
        "calibration": facts.calibration,
        "formats": sorted({site["format"] for site in facts.sites if site.get("format")}),
        "sites": list(facts.sites),
        "kernels": list(facts.kernels),
        "versions": installed_versions(),
        "dense_weight_bytes": facts.dense_weight_bytes,
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
