"""Let models of speech listen: told what was said, they predict each next token; else they say what they hear."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.codegen.lowering.entries import split
from compressor.graph.caches import empty_caches
from compressor.graph.kinds.encoder_decoder import Batch, Pair
from compressor.graph.model import ModelInfo
from compressor.runtime import collapsed, next_tokens, source_of, tokens_left, without

_ALL = 1 << 20  # one a frame at most, of 20 ms each
_LONGEST = 448  # tokens, for models that state no limit


class Listener(Protocol):
    """A model of speech."""

    def told(self, batch: Batch) -> Tensor:
        """Return the logits float32 [S, V] of the next token after each of a pair's, or of each frame of a sound."""

    def said(self, samples: NDArray[np.float32], most: int) -> list[int]:
        """Return the likeliest tokens for samples float32 [N], at most ``most``, up to the end of the text."""


class GraphListener:
    """A captured encoder-decoder in PyTorch, which encodes each sound once."""

    def __init__(self, graph: GraphModule) -> None:
        self._encode, self._decode = split(graph)
        self._info: ModelInfo = graph.meta["model"]
        assert self._info.encoder_source is not None
        self._facts: dict[str, Any] = dataclasses.asdict(self._info.encoder_source)

    @torch.no_grad()
    def told(self, pair: Batch) -> Tensor:
        """See :class:`Listener`."""
        assert isinstance(pair, Pair)
        count = pair.ids.shape[1]
        return self._steps(pair.source, count)(pair.ids, torch.arange(count))

    @torch.no_grad()
    def said(self, samples: NDArray[np.float32], most: int) -> list[int]:
        """See :class:`Listener`."""
        first = np.array([self._facts["start_ids"]])
        count = tokens_left(self._facts, most, most)
        step = self._steps(torch.from_numpy(source_of(samples, self._facts)), first.shape[1] + count)

        def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            found: NDArray[np.float32] = step(torch.from_numpy(ids), torch.tensor([ids.shape[1] - 1]))[0].numpy()
            return found

        def pick(scores: NDArray[np.float32], is_first: bool) -> int:
            return int(without(scores, self._facts, is_first).argmax())

        return list(next_tokens(logits, first, pick, dict.fromkeys(self._info.eos_ids, "eos_token"), count))

    def _steps(self, source: Tensor, capacity: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return (ids [1, S], rows to keep [R]) -> logits [R, V], after what earlier calls were given."""
        found = self._encode(source)
        crossing = list(found) if isinstance(found, tuple | list) else [found]
        caches, begin = empty_caches(self._info, 1, capacity), 0

        def step(ids: Tensor, keep: Tensor) -> Tensor:
            nonlocal begin
            end = begin + ids.shape[1]
            logits, *new = self._decode(ids, torch.arange(begin, end), keep, *caches, *crossing)
            for cache, rows in zip(caches, new, strict=True):
                cache[:, :, begin:end] = rows
            begin = end
            result: Tensor = logits[0]
            return result

        return step


class FramesListener:
    """A captured model that gives each frame of a sound a token, in PyTorch."""

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        reads = graph.meta["model"].encoder_source
        self._facts: dict[str, Any] = dataclasses.asdict(reads)

    @torch.no_grad()
    def told(self, batch: Batch) -> Tensor:
        """See :class:`Listener`."""
        assert isinstance(batch, Tensor)
        found = self._graph(batch)
        logits: Tensor = found[0] if isinstance(found, Tensor) else found[0][0]
        return logits

    def said(self, samples: NDArray[np.float32], most: int) -> list[int]:
        """See :class:`Listener`."""
        logits = self.told(torch.from_numpy(source_of(samples, self._facts)))
        return collapsed(logits.argmax(-1).numpy(), self._facts["blank_id"])[:most]


def listener_of(graph: GraphModule) -> Listener:
    """Return a captured model of speech, listening."""
    return FramesListener(graph) if graph.meta["model"].labels_frames else GraphListener(graph)


def most_tokens(model: Mapping[str, Any]) -> int:
    """Return how many tokens a model has positions for behind its first ones: the last needs none.

    Args:
        model: a manifest's facts, or a captured model's.
    """
    if model["encoder_source"].get("blank_id") is not None:
        return _ALL
    positions = model["max_positions"] or _LONGEST
    return int(positions) + 1 - len(model["encoder_source"]["start_ids"])
