"""Number the classes that names of folders or rows state, as the model numbers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.graph.model import ModelInfo

_SHOWN = 3


def class_numbers(names: Sequence[str], info: ModelInfo, label: str) -> Tensor:
    """Return the class of each image, int64 [n], from the class's name.

    Names are, in this order of trying: those that the model's configuration gives (``id2label``; case does not count,
    underscores are spaces, and one of several synonyms between commas is enough), numbers, or as many names as the
    model has classes, in the order of the alphabet, as torchvision numbers folders.

    Args:
        names: one for each image.
        info: of the model.
        label: of the data, for messages.
    Raises:
        UsageError: the names are none of these.
    """
    distinct = sorted(set(names))
    known = _known(info)
    numbers = {name: known[_plain(name)] for name in distinct if _plain(name) in known}
    unknown = [name for name in distinct if name not in numbers]
    if numbers and unknown:
        shown = ", ".join(unknown[:_SHOWN])
        raise UsageError(
            f"{label}: {shown}: not among the classes of {info.name} (config.json, id2label), and others of the data "
            "are; rename them"
        )
    if not numbers:
        numbers = _numbered(distinct, info, label)
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64)


def _numbered(distinct: list[str], info: ModelInfo, label: str) -> dict[str, int]:
    """Assign numbers to classes whose names the model does not know."""
    if all(name.isdecimal() and name.isascii() and len(name) < 10 for name in distinct):
        return {name: int(name) for name in distinct}
    if info.classes and len(distinct) != info.classes:
        shown = ", ".join(distinct[:_SHOWN]) + (", ..." if len(distinct) > _SHOWN else "")
        raise UsageError(
            f"{label}: has {len(distinct)} classes ({shown}), and {info.name} has "
            f"{info.classes} with other names; name classes as in config.json's id2label, or by their numbers"
        )
    return {name: number for number, name in enumerate(distinct)}


def knows_some(names: Sequence[str], info: ModelInfo) -> bool:
    """Return whether any of the names is a class of the model."""
    known = _known(info)
    return any(_plain(name) in known for name in names)


def _known(info: ModelInfo) -> dict[str, int]:
    """Return the numbers of a model's classes by name and synonym, in plain spelling."""
    known: dict[str, int] = {}
    for number, name in enumerate(info.class_names):
        for synonym in (name, *name.split(",")):
            known.setdefault(_plain(synonym), number)
    return known


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
