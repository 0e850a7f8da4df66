"""Describe a captured model, and copy its graph without copying its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from torch import fx
from torch.fx import GraphModule

from compressor.formats.cache import DENSE_CACHE

PREPROCESSOR = "preprocessor_config.json"
"""File of a model folder that says how pictures become what the model reads."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a captured model; ``graph.meta["model"]``.  Sizes are 0 where they have no meaning."""

    kind: Literal["decoder", "encoder", "module"]
    name: str  # folder name, hub id or class name
    architecture: str  # class name
    vocab_size: int = 0
    layers: int = 0  # attention layers, one cache entry each
    kv_heads: int = 0
    head_dim: int = 0
    cache_format: str = DENSE_CACHE  # of keys and values
    states: tuple[tuple[int, ...], ...] = ()  # of recurrent layers, float32, without the batch in front
    max_positions: int = 0  # 0: no limit stated
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    source: Path | None = None  # the folder, which also holds the tokenizer
    config_sha256: str = ""
    unpacked_bytes: int = 0  # of dense weights that the capture of a quantised checkpoint writes to the cache folder
    image_shape: tuple[int, ...] = ()  # channels, height, width, of a module whose one input is images
    classes: int = 0  # of such a module, whose one output is a row of logits for each image
    class_names: tuple[str, ...] = ()  # their names, where the model has any
    parameters: int = 0  # distinct numbers in the graph's parameters, ties counted once


def state_bytes(states: Iterable[Sequence[int]]) -> int:
    """Return the bytes of the recurrent layers' states of one sequence, however long it is."""
    return 4 * sum(prod(shape) for shape in states)


def weight_bytes(graph: GraphModule) -> int:
    """Return the bytes of the graph's parameters as stored, each counted once; buffers are not weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in graph.parameters())


def clone_graph(graph: GraphModule) -> GraphModule:
    """Copy a graph but not its parameters: rewriting one graph leaves the other as it is."""
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    nodes.set_codegen(graph.graph._codegen)
    copied = GraphModule(graph, nodes, class_name=type(graph).__name__)
    copied.meta.update(graph.meta)
    return copied
