"""Give examples of what an encoder reads, for the run that finds its layers and for exports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from compressor.graph.model import SourceInfo

_TOKENS, _SAMPLES, _FRAMES = 6, 4000, 64  # of an example; sound must be longer than what its convolutions look at


def example_source(info: SourceInfo) -> list[Tensor]:
    """Return an example of the encoder's inputs for a batch of 2, and the mask for text."""
    varying = _TOKENS if info.reads == "tokens" else _SAMPLES if len(info.shape) == 1 else _FRAMES
    shape = (2, *(size or varying for size in info.shape))
    if info.reads == "tokens":
        return [torch.full(shape, 3), torch.ones(shape, dtype=torch.float32)]
    return [torch.zeros(shape, dtype=torch.float32)]


def source_call(info: SourceInfo | None, batch: Any) -> tuple[list[Tensor], list[dict[int, Any]]]:
    """Return example arguments for the encoder, and their ``dynamic_shapes``; nothing for models without one.

    Args:
        batch: the batch's ``Dim``.
    """
    if info is None:
        return [], []
    given = example_source(info)
    longest = info.max_positions if info.reads == "tokens" else 0
    varying = {axis: Dim("source", min=1, max=longest or None) for axis, n in enumerate(info.shape, 1) if not n}
    return given, [{0: batch, **varying}] * len(given)
