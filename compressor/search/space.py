"""Describe a search space of architectures as data: sub-layers of a model, and what may stand in the place of each.

    block 3: attention   as_is | none
             ffn         as_is | width:0.75 | width:0.5 | none       channels are sorted: each width is a prefix

An alternative is a class in a file of :mod:`compressor.search.alternatives`, or an entry point in the group
``compressor.search.alternatives``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.blocks import Branch
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.rewrite import held_tensor, set_tensor
from compressor.graph.sites import Site
from compressor.registry import Registry

ALTERNATIVES = Registry(
    "alternative",
    "compressor.search.alternatives",
    "compressor.search.alternatives",
    base="compressor.search.space:Alternative",
)
AS_IS = "as_is"


@dataclass(frozen=True)
class SubLayer:
    """Hold one attention or feed-forward network of a model, in whose place others may stand.

    Attributes:
        name: for people.
        branch: where it is added to the residual stream.
        family: its inner channels; None where it has none that can go, or several families.
        readers: linears whose columns these channels are, in dataflow order.
        is_kept: it may not go as a whole.
    """

    name: str
    branch: Branch
    family: Family | None = None
    readers: tuple[Site, ...] = ()
    is_kept: bool = False

    @property
    def channels(self) -> int:
        """Number of inner channels; 0 where none can go."""
        return 0 if self.family is None else self.family.count


class Alternative(ABC):
    """Say what stands in the place of a sub-layer; extend it with a frozen dataclass."""

    @classmethod
    @abstractmethod
    def of(cls, layer: SubLayer, argument: str, multiple: int) -> Alternative | str:
        """Return the alternative for a sub-layer, or why there is none.

        Args:
            argument: what a recipe has behind the name and a colon; empty where it has none.
            multiple: channels are rounded up to a multiple of this.
        Raises:
            UsageError: the argument means nothing, whatever the sub-layer.
        """

    @property
    @abstractmethod
    def label(self) -> str:
        """Name it among a sub-layer's alternatives."""

    @property
    def channels(self) -> int | None:
        """Number of inner channels that stay, the most important ones; None if all do."""
        return None

    @property
    def stays(self) -> bool:
        """Tell whether anything is added to the residual stream."""
        return True


Space = Sequence[Sequence[Alternative]]
"""The alternatives of each sub-layer, as it is first."""


def alternatives(layers: Sequence[SubLayer], wanted: Mapping[str, Sequence[str]], multiple: int) -> Space:
    """List what may stand in the place of each sub-layer.

    Args:
        wanted: by part (``attention``, ``ffn``), names of alternatives as recipes write them: ``width:0.5``.
    Raises:
        UsageError: a name is unknown, or no sub-layer has an alternative; the first reasons are given.
    """
    space, reasons = [], list[str]()
    for layer in layers:
        found: dict[str, Alternative] = {}
        for text in (AS_IS, *wanted[layer.branch.part]):
            name, _, argument = text.partition(":")
            made = ALTERNATIVES.find(name).of(layer, argument, multiple)
            if isinstance(made, str):
                reasons.append(f"{layer.name}: {text}: {made}")
            else:
                found.setdefault(made.label, made)
        space.append(list(found.values()))
    if all(len(row) < 2 for row in space):
        why = "; ".join(reasons[:3]) or "name some in `attention` and `ffn`"
        raise UsageError(f"the search space is empty: no sub-layer has an alternative to what it is: {why}")
    return space


def uniform(layers: Sequence[SubLayer], space: Space) -> list[list[int]]:
    """List the architectures that have the same alternative everywhere, of each part, where a layer has it.

    Returns:
        Of each, the place of the alternative of each sub-layer.
    """
    labels = {part: dict[str, None]() for part in dict.fromkeys(layer.branch.part for layer in layers)}
    for layer, row in zip(layers, space, strict=True):
        labels[layer.branch.part] |= dict.fromkeys(one.label for one in row)
    found = []
    for chosen in product(*labels.values()):
        by_part = dict(zip(labels, chosen, strict=True))
        found.append([_place(row, by_part[layer.branch.part]) for layer, row in zip(layers, space, strict=True)])
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def _place(row: Sequence[Alternative], label: str) -> int:
    return next((place for place, one in enumerate(row) if one.label == label), 0)


@dataclass(frozen=True)
class Sorted:
    """Hold how a sub-layer's channels lie once the most important are first, and what reads only some of them.

    Attributes:
        order: the channels, the most important first, int64 [channels].
        refits: number of channels that stay -> weight of each reader, by site, float32 [out, in], sorted and with zeros
            behind these channels.
        errors: the same -> relative squared error of each reader's outputs.
    """

    order: Tensor
    refits: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    errors: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def sorted_axis(entries: Tensor, order: Tensor, size: int) -> Tensor:
    """Return the index that sorts an axis, int64 [size].

    Args:
        entries: of each channel, int64 [channels, entries of one].
        order: int64 [channels].
    """
    index = torch.arange(size)
    index[entries.flatten()] = entries[order].flatten()
    return index


def sort_channels(graph: GraphModule, family: Family, order: Tensor) -> None:
    """Put a family's channels in another order, in place, in all parameters that hold them: the model stays the same.

    The oracle is the model before.  Sort a family once: its places are those of the old order.
    """
    for (name, axis), entries in family.places.items():
        value = held_tensor(graph, name)
        index = sorted_axis(torch.from_numpy(entries), order, value.shape[axis])
        set_tensor(graph, name, value.index_select(axis, index.to(value.device)).contiguous())


def shorten(dependencies: Dependencies, layers: Sequence[SubLayer], chosen: Sequence[Alternative]) -> None:
    """Take away the channels behind each prefix that stays, in place.

    Args:
        dependencies: of the graph whose families the sub-layers hold, sorted.
    """
    gone = []
    for layer, one in zip(layers, chosen, strict=True):
        if one.channels is not None and layer.family is not None and one.stays:
            gone.append((layer.family, torch.arange(one.channels, layer.channels).numpy()))
    if gone:
        dependencies.remove(gone)
