"""Give examples of what an encoder reads, for the run that finds its layers and for exports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from compressor.graph.kinds.encoder_decoder import SAMPLES, SOURCE
from compressor.graph.model import ModelInfo, SourceInfo

_TOKENS, _SAMPLES = 6, 4000  # of an example; sound must be longer than what its convolutions look at


def example_source(info: SourceInfo) -> list[Tensor]:
    """Return an example of the encoder's inputs for a batch of 2, and the mask for text."""
    if info.reads == "tokens":
        shape = (2, _TOKENS)
        return [torch.full(shape, 3), torch.ones(shape, dtype=torch.float32)]
    return [torch.zeros(2, *info.sized(_SAMPLES))]


def with_least_source(info: ModelInfo, program: ExportedProgram) -> ModelInfo:
    """Return the model's description with the shortest source that its convolutions can read, as an export found it."""
    if info.encoder_source is None or info.encoder_source.reads == "tokens":
        return info
    names = (SOURCE, SAMPLES)
    (source,) = (node for node in program.graph.nodes if node.op == "placeholder" and node.name in names)
    sizes = [size.node.expr for size in source.meta["val"].shape[1:] if isinstance(size, torch.SymInt)]
    least = max([1, *(int(program.range_constraints[size].lower) for size in sizes)])
    return replace(info, encoder_source=replace(info.encoder_source, min_positions=least))


def source_call(info: SourceInfo | None, batch: Any) -> tuple[list[Tensor], list[dict[int, Any]]]:
    """Return example arguments for the encoder, and their ``dynamic_shapes``; nothing for models without one.

    Args:
        batch: the batch's ``Dim``.
    """
    if info is None:
        return [], []
    given = example_source(info)
    # Of sound, sizes behind convolutions are quotients, whose bounds torch.export must find by itself.
    size = Dim("source", min=1, max=info.max_positions or None) if info.reads == "tokens" else Dim.DYNAMIC
    varying = {axis: size for axis, n in enumerate(info.shape, 1) if not n}
    return given, [{0: batch, **varying}] * len(given)
