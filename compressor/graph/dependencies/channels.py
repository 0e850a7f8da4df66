"""Families of channels that a graph can do without, and the removal of some: the graph stays one that runs.

gate.weight [i, :]  up.weight [i, :]  down.weight [:, i]     channel i of one family: goes from all three or none
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.caches import restate_heads
from compressor.graph.dependencies.attention import cached_heads, why_unequal
from compressor.graph.dependencies.axes import Axes, Reading, is_fixed
from compressor.graph.dependencies.labels import Labels
from compressor.graph.dependencies.resizing import left, state_sizes
from compressor.graph.dependencies.rules import rule_of
from compressor.graph.provenance import describe
from compressor.graph.rewrite import held_tensor, set_tensor

_FACTOR = np.uint64(6364136223846793005)  # Knuth's, of a linear congruential generator
Place = tuple[str, int]
"""A parameter's name and one of its axes."""


@dataclass(frozen=True)
class Family:
    """Channels that lie in the same places, each in as many entries.

    Attributes:
        places: parameter and axis -> entries of each channel, int64 [channels, entries of one].
        reason: why none of them can go; empty if they can.
        groups: of attention heads, how many runs of them have to lose as many; 0 if they are not heads.
    """

    places: Mapping[Place, NDArray[np.int64]]
    reason: str
    groups: int = 0

    @property
    def count(self) -> int:
        """Number of channels."""
        return len(next(iter(self.places.values())))


class Dependencies:
    """Find which channels of a captured graph's parameters belong together.

    Args:
        graph: captured; nodes have ``meta["val"]``.
        by_query: whether query heads may go while keys and values stay, as many from each group that shares some; else
            whole groups go.
        in_places: whether channels change places, rather than go: those of a mean may.
    """

    def __init__(self, graph: GraphModule, by_query: bool = False, in_places: bool = False) -> None:
        self.graph, self._reading = graph, Reading(by_query, in_places)
        self._parameters: dict[Place, Labels] = {}
        self._in_places = in_places
        self._cached = {} if by_query else dict(cached_heads(graph.graph))
        for node in graph.graph.nodes:
            self._reading.axes[node] = self._axes(node)
        self._channels = self._reading.labels.channels()
        self._reasons = self._reading.labels.reasons(self._channels)
        self._groups = {
            channel: count if by_query else 1
            for heads, count in self._reading.heads
            for channel in self._channels[heads].tolist()
        }

    def _axes(self, node: Node) -> Axes | tuple[Axes, ...]:
        labels = self._reading.labels
        if node.op == "get_attr":
            shape = held_tensor(self.graph, str(node.target)).shape
            axes = [self._parameters.setdefault((str(node.target), a), labels.fresh(n)) for a, n in enumerate(shape)]
            return list(axes)
        if node.op == "placeholder":
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, Tensor) else ()
            found: Axes = [labels.fresh(size) if is_fixed(size) else None for size in sizes]
            self._keep_ends(node, found, f"{node.target} is an input of the model")
            return found
        if node.op == "output":
            for source in node.all_input_nodes:
                self._keep_ends(source, self._reading.of(source), f"{describe(source)} is an output of the model")
            return []
        return rule_of(node)(node, self._reading)

    def _keep_ends(self, node: Node, axes: Axes, reason: str) -> None:
        """Keep what the model reads or returns, but for heads of caches, which get smaller with it."""
        self._reading.keep([one for axis, one in enumerate(axes) if self._cached.get(node) != axis], reason)

    def families(self) -> list[Family]:
        """List the families, in the order of the parameters; channels of one family lie in the same places.

        Channels that change places lie in the same tensors between operators as well.
        """
        tensors = self._tensors() if self._in_places else np.zeros(len(self._channels), np.uint64)
        entries: dict[int, dict[Place, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place, labels in self._parameters.items():
            for entry, channel in enumerate(self._channels[labels].tolist()):
                entries[channel][place].append(entry)
        alike: dict[Any, list[int]] = defaultdict(list)
        for channel, held in entries.items():
            signature = tuple((place, len(found)) for place, found in held.items())
            reason, groups = self._reasons.get(channel, ""), self._groups.get(channel, 0)
            alike[signature, reason, groups, int(tensors[channel])].append(channel)
        return [
            Family({place: np.array([entries[c][place] for c in channels]) for place, _ in signature}, reason, groups)
            for (signature, reason, groups, _), channels in alike.items()
        ]

    def _tensors(self) -> NDArray[np.uint64]:
        """Return a digest for each channel of the tensors that it lies in, and how often: uint64 [labels]."""
        found, place = np.zeros(len(self._channels), np.uint64), 0
        for axes in self._reading.axes.values():
            for one in axes if isinstance(axes, tuple) else (axes,):
                for labels in one:
                    place += 1
                    if labels is not None:
                        channels, counts = np.unique(self._channels[labels], return_counts=True)
                        found[channels] = found[channels] * _FACTOR + (counts + 1021 * place).astype(np.uint64)
        return found

    def remove(self, chosen: Sequence[tuple[Family, NDArray[np.int64]]]) -> None:
        """Take channels away, in place: parameters get shorter, and sizes that the graph states follow.

        Args:
            chosen: families and the channels to remove, as places in the family.
        Raises:
            ValueError: a family's channels have to stay, or heads are left that no attention can group.
        """
        gone = self._gone(chosen)
        for heads, count in self._reading.heads:
            if why := why_unequal(heads, count, gone):
                raise ValueError(why)
        for name in dict.fromkeys(name for name, _ in self._parameters):
            self._shorten(name, gone)
        for node in self.graph.graph.nodes:
            self._resize(node, gone)
        restate_heads(self.graph)
        self.graph.recompile()

    def _gone(self, chosen: Sequence[tuple[Family, NDArray[np.int64]]]) -> NDArray[np.bool_]:
        """Return for each label whether its channel goes."""
        gone = np.zeros(self._reading.labels.count, bool)
        for family, removed in chosen:
            if family.reason:
                raise ValueError(f"these channels have to stay: {family.reason}")
            for place, entries in family.places.items():
                gone[self._channels[self._parameters[place][entries[removed]]]] = True
        return gone[self._channels]

    def _shorten(self, name: str, gone: NDArray[np.bool_]) -> None:
        old = value = held_tensor(self.graph, name)
        for axis in range(value.dim()):
            labels = self._parameters[name, axis]
            if gone[labels].any():
                value = value.index_select(axis, torch.from_numpy(np.flatnonzero(~gone[labels])).to(value.device))
        if value is not old:
            set_tensor(self.graph, name, value.contiguous())

    def _resize(self, node: Node, gone: NDArray[np.bool_]) -> None:
        """Give a node the sizes that are left, in its arguments and in what is known of its value."""
        found, value = self._reading.axes[node], cast(Any, node.meta.get("val"))
        if node.op == "get_attr":
            node.meta["val"] = held_tensor(self.graph, str(node.target))
        elif isinstance(found, tuple):
            state_sizes(node, self._reading, gone)
            shapes = [left(axes, one, gone) for axes, one in zip(found, value, strict=True)]
            node.meta["val"] = type(value)(one.new_empty(shape) for one, shape in zip(value, shapes, strict=True))
        elif isinstance(value, Tensor):
            state_sizes(node, self._reading, gone)  # also where all that a slice takes stays: it may lie elsewhere
            if any(one is not None and gone[one].any() for one in found):
                node.meta["val"] = value.new_empty(left(found, value, gone))
