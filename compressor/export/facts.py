"""Describe a compressed model in a manifest: the fields that bundles of all kinds share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.data.embedding_texts import read_pooling
from compressor.errors import CompressorError, UsageError
from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.kinds.draft_heads import without_heads
from compressor.graph.kinds.encoder_decoder import encoder_nodes
from compressor.graph.kinds.tables import rows_of_tables
from compressor.graph.model import PREPROCESSOR, ModelInfo, state_bytes

if TYPE_CHECKING:
    from torch import nn

    from compressor.pipeline.context import Context
    from compressor.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class BundleFacts:
    """State what manifests of all kinds say.  Everything here must be the same in two runs with the same inputs.

    Attributes:
        model: fields of ModelInfo; ``source`` is left out of the manifest.
        recipe: after defaults and overrides.
        sites: site, format, bytes_before, bytes_after, ... of each record.
        dense_weight_bytes: of the model before any pass.
        calibration: source, samples, tokens and SHA-256 of the calibration data.
        tokenizer: folder of the model; None for a model without text.
        preprocessor: file that says how pictures become the model's input; None where there is none.
        lock: text of compress.lock.
    """

    model: Mapping[str, Any]
    recipe: Mapping[str, Any]
    sites: Sequence[Mapping[str, Any]]
    dense_weight_bytes: int
    calibration: Mapping[str, Any] | None = None
    tokenizer: Path | None = None
    preprocessor: Path | None = None
    lock: str | None = None


def run_facts(
    graph: GraphModule, recipe: Recipe, context: Context, dense_weight_bytes: int, lock: str | None = None
) -> BundleFacts:
    """Gather the facts about a run: what its passes did to the graph, and to which model."""
    info: ModelInfo = graph.meta["model"]
    return BundleFacts(
        model=model_facts(graph) | ({} if recipe.drafts is None else {"speculate": recipe.drafts}) | _pooling(info),
        recipe=recipe.resolved(),
        sites=[dataclasses.asdict(record) for record in context.records],
        dense_weight_bytes=dense_weight_bytes,
        calibration=None if context.samples is None else context.samples.facts(),
        tokenizer=info.source if info.kind != "module" or info.pair is not None or info.hears else None,
        preprocessor=_preprocessor(info),
        lock=lock,
    )


def _pooling(info: ModelInfo) -> dict[str, str]:
    """Return how an encoder's hidden states become an embedding, if that is known here."""
    if info.kind != "encoder" or info.source is None:
        return {}
    try:
        return {"pooling": read_pooling(info.source)}
    except UsageError:  # servers of the bundle ask for it
        return {}


def _preprocessor(info: ModelInfo) -> Path | None:
    file = None if info.source is None or info.kind != "module" else info.source / PREPROCESSOR
    return file if file is not None and file.is_file() else None


def stored_parameter(graph: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter that the kernels take.

    Raises:
        CompressorError: the graph lacks it.
    """
    try:
        return graph.get_parameter(name)
    except AttributeError as error:
        raise CompressorError(f"the kernels need the parameter {name}, which the graph does not have") from error


def model_facts(graph: GraphModule) -> dict[str, Any]:
    """Return the manifest's entry about the model."""
    info: ModelInfo = graph.meta["model"]
    cache_bytes = cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim)
    read: dict[str, Any] = {"weight_bytes_per_token": weight_bytes_per_token(graph)}
    read["cache_bytes_per_token"] = cache_bytes
    if info.kind == "module":
        read |= {"inputs": input_facts(graph)}
        read |= {"outputs": graph.meta["outputs"]} if graph.meta["outputs"] else {}
    facts = {**dataclasses.asdict(info), **read}
    if not facts["states"]:
        del facts["states"]
    else:
        facts["state_bytes"] = state_bytes(info.states)
    if not facts["uneven_heads"]:
        del facts["uneven_heads"]
    for inner in ("speculates", "draft_heads", "first_blocks"):  # `entries` and `parts` say it
        del facts[inner]
    if not info.predicts:
        del facts["predicts"]
    if info.encoder_source is None:
        del facts["encoder_source"]
    for name in ("pair", "exits", "depths"):
        if facts[name] is None:
            del facts[name]
    return facts


def input_facts(graph: GraphModule) -> list[dict[str, Any]]:
    """Return type and shape of each input; a symbolic size is a text, the same one wherever the size is the same."""
    sizes: dict[str, str] = {}

    def size(value: int | torch.SymInt) -> int | str:
        return value if isinstance(value, int) else sizes.setdefault(str(value), f"n{len(sizes)}")

    tensors = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return [
        {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [size(n) for n in tensor.shape]}
        for tensor in tensors
    ]


def weight_bytes_per_token(graph: GraphModule) -> int:
    """Bytes of parameters that one token reads in a step without drafts.

    These are all but those that only an encoder-decoder's encoder reads; of a table that only an embedding uses one
    row, of experts as many as a token has, and of codes whose inputs are skipped what tokens of the samples read.
    """
    graph = without_heads(graph)
    partly: dict[str, float] = graph.meta.get("read_shares", {})
    total, shares, once = 0, _expert_shares(graph), set(encoder_nodes(graph))
    rows = rows_of_tables(graph, once)
    read = {str(node.target) for node in graph.graph.find_nodes(op="get_attr") if set(node.users) - once}
    for name, parameter in graph.named_parameters():
        each, experts = shares.get(name, (1, 1))
        if name in read:
            size = parameter.numel() * parameter.element_size() * each // experts // rows.get(name, 1)
            total += round(size * partly.get(name, 1.0))
    return total


def _expert_shares(graph: GraphModule) -> dict[str, tuple[int, int]]:
    """Return, for each parameter of stacked experts, how many experts a token has, and of how many.

    Where the experts of a weight are stored in several formats, each format's are read as often as all are.
    """
    found: dict[str, tuple[int, int]] = {}
    ours = torch.ops.compressor
    for target in (ours.routed_linear.default, ours.packed_routed_linear.default):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            index: Any = node.args[1]
            stored = [source for source in node.all_input_nodes if source.op == "get_attr"]
            experts = len(graph.get_parameter(str(stored[0].target)))
            if index.target is torch.ops.aten.index.Tensor:  # numbers the experts of a format
                experts = len(graph.get_buffer(str(index.args[0].target)))
            found |= {str(source.target): (int(node.meta["val"].shape[1]), experts) for source in stored}
    return found
