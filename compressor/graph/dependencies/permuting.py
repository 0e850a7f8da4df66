"""Sets of channels that can change places without changing what a model computes, and the change.

gate.weight [i, :]  up.weight [i, :]  down.weight [:, i]     the inner channels of a feed-forward network
table [:, i]  norm [i]  q.weight [:, i]  o.weight [i, :]     the whole residual stream, in all layers alike
v.weight [i of a head, :]  o.weight [:, i of its heads]      the values of each head of keys and values, by themselves
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.dependencies.channels import Dependencies, Family, Place
from compressor.graph.folding import CannotFold, find_scale_target, is_attention
from compressor.graph.rewrite import held_tensor, set_tensor
from compressor.graph.sites import group_by_input, linear_sites
from compressor.host.tensor_files import release


@dataclass(frozen=True)
class FreeSet:
    """Channels that may change places.

    Attributes:
        families: each is permuted by itself; of attention one for each head of keys and values, else one.
        reason: why they have to stay where they are; empty if they need not.
    """

    families: tuple[Family, ...]
    reason: str = ""

    @property
    def places(self) -> set[Place]:
        """Parameters and axes that hold some of them."""
        return {place for family in self.families for place in family.places}


def free_sets(graph: GraphModule) -> list[FreeSet]:
    """List the sets of channels of a captured graph's parameters, heads of attention as their values."""
    found = [
        FreeSet((family,), family.reason)
        for family in Dependencies(graph, in_places=True).families()
        if family.count > 1 and not family.groups
    ]
    return [*found, *_values_of_heads(graph)]


def _values_of_heads(graph: GraphModule) -> Iterator[FreeSet]:
    """Yield the channels of the values of each attention; they also leave for caches, which are the model's own."""
    for group in group_by_input(linear_sites(graph)):
        if not is_attention(group[0].input):
            continue
        columns = {(site.weight_name, 1) for site in group}
        try:
            target, readers = find_scale_target(graph, group[0].input)
        except CannotFold as reason:
            everything = np.arange(group[0].in_features)[:, None]
            yield FreeSet((Family(dict.fromkeys(columns, everything), str(reason)),), str(reason))
            continue
        assert target.shares is not None
        heads, repeat, width = target.shares
        families = []
        for head in range(heads):
            own = head * width + np.arange(width)[:, None]
            read = (head * repeat + np.arange(repeat)) * width + np.arange(width)[:, None]
            places = {(name, 0): own for name in target.parameters} | {(site.weight_name, 1): read for site in readers}
            families.append(Family(places, ""))
        yield FreeSet(tuple(families))


def permute(graph: GraphModule, family: Family, order: Tensor) -> None:
    """Put channel ``order[i]`` of a family in the place of channel i, in all parameters; their types stay.

    Args:
        order: int64 [channels].
    """
    for (name, axis), entries in family.places.items():
        old = held_tensor(graph, name)
        index = moved(old.shape[axis], entries, order)
        set_tensor(graph, name, old.index_select(axis, index.to(old.device)).contiguous())
        release([old])


def moved(size: int, entries: NDArray[np.int64], order: Tensor) -> Tensor:
    """Return which entry of an axis comes to each place, int64 [size].

    Args:
        entries: of each channel, int64 [channels, entries of one].
    """
    index, places = torch.arange(size), torch.from_numpy(entries)
    index[places] = places[order]
    return index
