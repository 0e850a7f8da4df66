"""Rotary embeddings whose frequencies depend on the length of the text, as pure functions of the positions.

    longrope      long factors where a text is longer than those that the model was first trained on, else short ones
    dynamic NTK   a base that grows with the length beyond the positions that the model was trained for

Transformers keeps the frequencies in a buffer and overwrites it as it runs.  Here the same frequencies are computed
from the last position of the call, so that a captured graph chooses anew each time, as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class _WithFrequencies:
    """Stands in for a module that computes rotations, with other frequencies."""

    def __init__(self, module: nn.Module, **frequencies: Tensor) -> None:
        self.__dict__.update(frequencies)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def make_rotations_pure(model: nn.Module) -> None:
    """Let all rotations of a model compute the frequencies that depend on the length, and store nothing."""
    for module in model.modules():
        written = getattr(type(module).forward, "__wrapped__", None)
        if written is None or not hasattr(module, "rope_type"):
            continue
        kinds = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
        if any(map(_depends_on_length, kinds)):
            module.forward = partial(_rotate, module, written)


def _depends_on_length(kind: object) -> bool:
    return kind == "longrope" or "dynamic" in str(kind)


def _rotate(
    module: Any, written: Callable[..., Any], x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Any:
    """Compute a module's rotations as its class has written it, with the frequencies of this call."""
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    given = () if layer_type is None else (layer_type,)
    if not _depends_on_length(kind):
        return written(module, x, position_ids, *given)
    prefix = "" if layer_type is None else f"{layer_type}_"
    length = position_ids.flatten()[-1] + 1  # positions rise: the last is the largest
    frequencies = _frequencies(module, kind, length, layer_type, prefix)
    return written(_WithFrequencies(module, **{f"{prefix}inv_freq": frequencies}), x, position_ids, *given)


def _frequencies(module: Any, kind: str, length: Tensor, layer_type: str | None, prefix: str) -> Tensor:
    """Return the inverse frequencies of a text that is so long, float32 [half of the rotated channels]."""
    compute, named = ROPE_INIT_FUNCTIONS[kind], {} if layer_type is None else {"layer_type": layer_type}
    if kind != "longrope":
        return compute(module.config, length.device, seq_len=length, **named)[0].float()
    parameters = module.config.rope_parameters
    trained = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    short = getattr(module, f"{prefix}original_inv_freq")
    long, _ = compute(module.config, length.device, seq_len=trained + 1, **named)
    return torch.where(length > trained, long, short)
