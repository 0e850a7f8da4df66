"""Describe a captured model, and copy its graph without copying its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

from torch import fx
from torch.fx import GraphModule

from compressor.formats.cache import DENSE_CACHE

PREPROCESSOR = "preprocessor_config.json"
"""File of a model folder that says how pictures become what the model reads."""


@dataclass(frozen=True)
class SourceInfo:
    """Facts about an encoder-decoder: what its encoder reads, and how its decoder begins and ends; or about CTC.

    A model with a CTC head gives each frame of a sound a token, one of which is blank.

    Attributes:
        reads: ``tokens``: ids int64 [B, N] and a mask float32 [B, N]; ``audio``: samples or features, float32.
        shape: of one source, without the batch; a size that may vary is 0.
        max_positions: the longest source in tokens, or along the size that varies; 0 where no limit is stated.
        min_positions: the shortest; convolutions look at several samples at once.
        blank_id: the token of frames that say nothing new (CTC); None where a decoder writes.
        start_ids: what the decoder reads first.
        suppressed_ids: tokens that are never generated.
        first_suppressed_ids: tokens that are not generated first.
        forced_eos_id: the token that is generated last where a generation reaches its limit; None for none.
        features: how sound becomes the source: method and settings of the model's processor; empty for text.
    """

    reads: Literal["tokens", "audio"]
    shape: tuple[int, ...]
    max_positions: int
    start_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...] = ()
    first_suppressed_ids: tuple[int, ...] = ()
    forced_eos_id: int | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    min_positions: int = 1
    blank_id: int | None = None

    def sized(self, samples: int) -> tuple[int, ...]:
        """Return the shape of one sound of about so many samples, of which a frame of features has 160."""
        varying = samples if len(self.shape) == 1 else samples // 160
        return tuple(size or varying for size in self.shape)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> SourceInfo:
        """Return what a bundle's manifest says."""
        known: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in facts.items()}
        return cls(**known)


@dataclass(frozen=True)
class PairInfo:
    """Facts about a model that embeds pictures and texts.  Similarities are ``scale * product + bias``.

    Attributes:
        scale, bias: of similarities, from the model's weights; 1 and 0 where these were not read.
        pad_id: token that fills texts up.
        is_filled: texts are filled up to the model's positions and nothing is hidden; else a mask hides what is filled.
    """

    scale: float = 1.0
    bias: float = 0.0
    pad_id: int = 0
    is_filled: bool = False


@dataclass(frozen=True)
class ExitInfo:
    """Where tokens leave a decoder early, and from which confidence on: the top-1 probability there.

    Attributes:
        blocks: blocks that run in front of each exit, rising.
        thresholds: the least confidence with which a token is taken there; above 1 where none ever is.
        give_up: a text ends where the mean confidence of its last ``window`` tokens at the first exit is below this; 0
            ends none.
        window: tokens of that mean.
        head: what norm and head cost, in blocks.
        of: blocks of the whole model.
    """

    blocks: tuple[int, ...]
    thresholds: tuple[float, ...]
    give_up: float = 0.0
    window: int = 8
    head: float = 0.0
    of: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a captured model; ``graph.meta["model"]``.  Sizes are 0 where they have no meaning."""

    kind: Literal["decoder", "encoder", "seq2seq", "module"]
    name: str  # folder name, hub id or class name
    architecture: str  # class name
    vocab_size: int = 0
    layers: int = 0  # attention layers, one cache entry each
    kv_heads: int = 0  # of each cache; the most, where caches differ
    uneven_heads: tuple[int, ...] = ()  # of keys, by cache, where not all have as many
    head_dim: int = 0
    cache_format: str = DENSE_CACHE  # of keys and values
    states: tuple[tuple[int, ...], ...] = ()  # of recurrent layers, float32, without the batch in front
    speculates: bool = False  # a decoder's library has an entry that verifies drafted tokens
    draft_heads: int = 0  # that a decoder has for drafts: its last output is theirs
    first_blocks: int | None = None  # that draft, as an entry of their own; 0 makes one of each half of a block
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
    encoder_source: SourceInfo | None = None  # of an encoder-decoder, whose kind is seq2seq; of CTC, a module's
    pair: PairInfo | None = None  # of a model of pictures with texts, whose kind is module
    exits: ExitInfo | None = None  # of a decoder whose tokens may leave early
    depths: tuple[int | None, ...] | None = None  # of one whose blocks end: the first position that passes each by

    @property
    def cache_heads(self) -> tuple[int, ...]:
        """Return the heads of keys of each cache."""
        return self.uneven_heads or (self.kv_heads,) * self.layers

    def with_cache_heads(self, heads: Sequence[int]) -> ModelInfo:
        """Return the facts of a model with so many heads of keys in each of its caches."""
        uneven = tuple(heads) if len(set(heads)) > 1 else ()
        return replace(self, layers=len(heads), kv_heads=max(heads, default=self.kv_heads), uneven_heads=uneven)

    @property
    def leaves_early(self) -> bool:
        """Return whether tokens need not run all blocks, whose number has to stay then."""
        return self.exits is not None or self.depths is not None

    @property
    def stages(self) -> tuple[int, ...]:
        """Return how many blocks run in front of each place where its kernels are cut; nothing where they are not."""
        if self.depths is not None:
            return tuple(i for i, (one, other) in enumerate(pairwise(self.depths), 1) if one != other)
        return () if self.exits is None else self.exits.blocks

    @property
    def hears(self) -> bool:
        """Return whether it reads sound and writes what is said."""
        return self.encoder_source is not None and self.encoder_source.reads == "audio"

    @property
    def labels_frames(self) -> bool:
        """Return whether it gives each frame of a sound a token (CTC); its kind is module."""
        return self.encoder_source is not None and self.encoder_source.blank_id is not None

    @property
    def generates(self) -> bool:
        """Return whether it predicts tokens one after another, from caches."""
        return self.kind in ("decoder", "seq2seq")


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
