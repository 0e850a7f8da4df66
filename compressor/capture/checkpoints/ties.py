"""Undo the ties of a model's class where the checkpoint stores other values under both names, as transformers does.

Configurations of T5 cannot state it: the class ties its head to the table of words, and FLAN-T5 stores both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compressor.capture.weights import WeightSource, spellings
from compressor.host.tensor_files import map_safetensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def untie(model: PreTrainedModel, source: WeightSource) -> tuple[str, ...]:
    """Give names that are tied and stored with different values a parameter each.

    Stored values are looked at for this alone even where no weight is read; where that cannot be, tensors of one shape
    count as equal.

    Args:
        model: a meta model; it is changed.
        source: of its weights.
    Returns:
        What the user should know.
    """
    notes, prefix = [], model.base_model_prefix
    for names in _tied(model):
        stored = {name: key for name in names for key in spellings(name, prefix) if key in source.names}
        kept: list[str] = []  # names whose values differ
        for name, key in stored.items():
            if not any(_alike(source, key, stored[other]) for other in kept):
                kept.append(name)
        for name in kept[1:]:
            own = nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
            for other in stored:
                if _alike(source, stored[other], stored[name]):
                    _set(model, other, own)
            notes.append(f"{name} and {kept[0]}, which {type(model).__name__} ties, are stored apart: both are kept")
    return tuple(notes)


def _tied(model: nn.Module) -> Sequence[list[str]]:
    """List the names of each parameter that has several."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


def _alike(source: WeightSource, first: str, second: str) -> bool:
    """Return whether two stored tensors are equal."""
    if first == second:
        return True
    a, b = _values(source, first), _values(source, second)
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return a.shape == b.shape
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def _values(source: WeightSource, name: str) -> Tensor:
    """Return a stored tensor, mapped from its file where the source gives headers alone."""
    tensor, files = source.read(name), source.files
    if tensor.is_meta and name in files and files[name].suffix == ".safetensors":
        return map_safetensors(files[name])[name]
    return tensor
