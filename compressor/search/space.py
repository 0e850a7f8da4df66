"""Describe a search space of architectures as data: sub-layers of a model, and what may stand in the place of each.

    block 3: attention   as_is | heads:0.5 | kv_heads:2 | linear | none
             ffn         as_is | width:0.75 | width:0.5 | linear | none      channels are sorted: each width is a prefix
    layer1.2: convolution  as_is | width:0.75 | width:0.5 | none             of a network of images

An alternative is a class in a file of :mod:`compressor.search.alternatives`, or an entry point in the group
``compressor.search.alternatives``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.blocks import Branch
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.rewrite import held_tensor, set_tensor
from compressor.graph.sites import Site
from compressor.registry import ALTERNATIVES

AS_IS = "as_is"


@dataclass(frozen=True)
class Cut:
    """Inner channels of a sub-layer, or heads, of which some can go.

    Attributes:
        family: where they lie.
        readers: linears whose columns they are, in dataflow order.
    """

    family: Family
    readers: tuple[Site, ...]

    @property
    def runs(self) -> int:
        """Number of runs of channels that have to lose as many as one another."""
        return self.family.groups or 1

    def gone(self, kept: Tensor) -> NDArray[np.int64]:
        """Return the channels that go, where those of these numbers stay."""
        return np.setdiff1d(np.arange(self.family.count), kept.numpy())

    def first(self, count: int) -> Tensor:
        """Return the first ``count`` channels, as many of each run, int64 [count]."""
        size, left = self.family.count // self.runs, count // self.runs
        return (size * torch.arange(self.runs)[:, None] + torch.arange(left)).flatten()


@dataclass(frozen=True)
class Mapped:
    """Say where one linear can stand in the place of all of a sub-layer but its first norm.

    Attributes:
        name: of the linear.
        source: what it reads, [..., in].
        term: what is added to the residual stream, [..., out].
        weight: name of a weight of the sub-layer, whose type its own gets.
    """

    name: str
    source: Node
    term: Node
    weight: str

    def dtype(self, graph: GraphModule, name: str) -> torch.dtype | None:
        """Return the type of a parameter of its own, or None for others: a bias is float32, as all vectors are."""
        if not name.startswith(f"{self.name}."):
            return None
        return torch.float32 if name.endswith(".bias") else graph.get_parameter(self.weight).dtype


@dataclass(frozen=True)
class SubLayer:
    """Hold one attention, feed-forward network or convolutions of a model, in whose place others may stand.

    Attributes:
        name: for people.
        branch: where it is added to the residual stream.
        cuts: its ``channels``, or ``groups`` of heads and ``query_heads``, where they can go and are one family.
        mapped: where a linear can stand in its place, or why it cannot.
        heads: of keys in its caches; 0 where it has none.
        is_kept: it may not go as a whole.
    """

    name: str
    branch: Branch
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    mapped: Mapped | str = ""
    heads: int = 0
    is_kept: bool = False

    def cut(self, one: Alternative) -> Cut | None:
        """Return what an alternative takes channels of; None where it takes none."""
        return None if one.channels is None else self.cuts[one.of_what]

    def readers(self, one: Alternative) -> tuple[Site, ...]:
        """Return the linears whose columns go in an alternative."""
        cut = self.cut(one)
        return () if cut is None else cut.readers

    def heads_left(self, one: Alternative) -> int:
        """Return the heads of keys that are left in its caches; 0 where caches go."""
        if not one.stays or one.is_linear:
            return 0
        return one.channels if one.channels is not None and one.of_what == "groups" else self.heads


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
    def kind(self) -> str:
        """Name what it has in common with alternatives of other sub-layers in a uniform architecture."""
        return self.label

    @property
    def fmt(self) -> Format | None:
        """Return the format of its linears; None where the search has one for all, or none."""
        return None

    @property
    def plain(self) -> Alternative:
        """Return the alternative without a format of its own."""
        return self

    @property
    def of_what(self) -> str:
        """Return the parts of which some stay: ``channels``, ``groups`` of heads, or ``query_heads``."""
        return "channels"

    @property
    def channels(self) -> int | None:
        """Number of these that stay, the most important ones; None if all do."""
        return None

    @property
    def is_linear(self) -> bool:
        """Tell whether one linear stands in the place of all but the first norm."""
        return False

    @property
    def stays(self) -> bool:
        """Tell whether anything is added to the residual stream."""
        return True


def share_of(name: str, argument: str, of_what: str) -> float:
    """Return the share of channels or heads that a recipe keeps.

    Raises:
        UsageError: it is not a number between 0 and 1.
    """
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"{name}:{argument}: give a share of the {of_what}, above 0 and below 1: {name}:0.5")
    return share


Space = Sequence[Sequence[Alternative]]
"""The alternatives of each sub-layer, as it is first."""


def alternatives(
    layers: Sequence[SubLayer], wanted: Mapping[str, Sequence[str]], multiple: int, may_be_empty: bool = False
) -> Space:
    """List what may stand in the place of each sub-layer.

    Args:
        wanted: by part (``attention``, ``ffn``, ``convolution``), names of alternatives as recipes write them:
            ``width:0.5``.
        may_be_empty: there is something else to choose.
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
    if not may_be_empty and all(len(row) < 2 for row in space):
        why = "; ".join(reasons[:3]) or "name some in `attention`, `ffn` or `convolution`"
        raise UsageError(f"the search space is empty: no sub-layer has an alternative to what it is: {why}")
    return space


def uniform(layers: Sequence[SubLayer], space: Space) -> list[list[int]]:
    """List the architectures that have the same alternative everywhere, of each part, where a layer has it.

    Returns:
        Of each, the place of the alternative of each sub-layer.
    """
    kinds = {part: dict[str, None]() for part in dict.fromkeys(layer.branch.part for layer in layers)}
    for layer, row in zip(layers, space, strict=True):
        kinds[layer.branch.part] |= dict.fromkeys(one.kind for one in row)
    found = []
    for chosen in product(*kinds.values()):
        by_part = dict(zip(kinds, chosen, strict=True))
        found.append([_place(row, by_part[layer.branch.part]) for layer, row in zip(layers, space, strict=True)])
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def _place(row: Sequence[Alternative], kind: str) -> int:
    return next((place for place, one in enumerate(row) if one.kind == kind), 0)


@dataclass(frozen=True)
class Start:
    """Hold how an alternative of a sub-layer is built: which channels stay, and its weights.

    Attributes:
        kept: numbers of the channels that stay, rising, int64; none of a linear that stands for all.
        weights: by parameter, float32, in the shapes that they have once the architecture is built; others stay.
        errors: by site, relative squared error of its outputs on the samples that the weights were fitted to; of
            trained weights, of the state behind the sub-layer on samples that are held out.
    """

    kept: Tensor
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


Starts = Sequence[Mapping[str, Start]]
"""The starts of each sub-layer, by the labels of its alternatives."""


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


def kept_entries(cut: Cut, kept: Tensor, name: str, axis: int, size: int) -> Tensor:
    """Return the entries of a parameter's axis that are left, rising, int64."""
    left = torch.ones(size, dtype=torch.bool)
    if (name, axis) in cut.family.places:
        left[torch.from_numpy(cut.family.places[name, axis][cut.gone(kept)].flatten())] = False
    return left.nonzero()[:, 0]


def physical(value: Tensor, name: str, cut: Cut, kept: Tensor) -> Tensor:
    """Return a parameter without the channels that go.

    Args:
        kept: numbers of the channels that stay.
    """
    for axis in range(value.dim()):
        if (name, axis) in cut.family.places:
            value = value.index_select(axis, kept_entries(cut, kept, name, axis, value.shape[axis]))
    return value


def padded(part: Tensor, whole: Tensor, name: str, cut: Cut, kept: Tensor) -> Tensor:
    """Return a parameter of the whole shape for one without the channels that go, which nothing reads then.

    Args:
        whole: what is in the place of rows that go; columns that go are zero.
    """
    full = part.new_zeros(whole.shape) if (name, 1) in cut.family.places else whole.to(part.dtype).clone()
    axes = range(whole.dim())
    index = [kept_entries(cut, kept, name, axis, whole.shape[axis]) for axis in axes]
    full[tuple(one.view(-1, *[1] * (whole.dim() - 1 - axis)) for axis, one in zip(axes, index, strict=True))] = part
    return full


def shorten(graph: GraphModule, gone: Sequence[tuple[Cut, str, Tensor]]) -> None:
    """Take channels away, in place: of each sub-layer all but those that stay.

    Args:
        gone: channels, what they are (:attr:`Alternative.of_what`), and the numbers of those that stay.
    """
    for by_query in (False, True):
        chosen = [(cut.family, cut.gone(kept)) for cut, what, kept in gone if (what == "query_heads") == by_query]
        if chosen:
            Dependencies(graph, by_query).remove(chosen)
