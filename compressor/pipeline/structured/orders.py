"""Find the free sets of a graph whose order matters to a format, and the values of linears that a search compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import pad

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.graph.dependencies.channels import Family
from compressor.graph.dependencies.permuting import FreeSet, free_sets
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.channels.permutation import Goal, KeptBlocks, KeptOfGroups, Piece
from compressor.numerics.channels.shared_scales import SharedScales
from compressor.pipeline.sites import choose_sites

Aim: TypeAlias = Literal["n_of_m", "blocks", "groups"]
"""Purpose of an order: patterns N:M, blocks, or groups that share a scale."""
FEATURES = 8192
"""Rows or columns that a search looks at; of more, every second, third, ... of each weight."""
_NAMED = 3  # reasons that a message gives
_BYTES, _TURNS = 400, 3  # that a round of exchanges moves, for each entry; rounds until no more exchange helps


@dataclass(frozen=True)
class FreeLinears:
    """A free set of channels, and the linears that its order matters to.

    Attributes:
        free: the channels.
        readers, writers: whose columns, and whose rows, they are.
    """

    free: FreeSet
    readers: tuple[Site, ...]
    writers: tuple[Site, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        """All of the linears."""
        return (*self.readers, *self.writers)

    @property
    def size(self) -> str:
        """Say how many channels and linears there are."""
        heads, count = len(self.free.families), self.free.families[0].count
        return f"{f'{heads} x ' if heads > 1 else ''}{count} channels of {len(self.sites)} linears"


@dataclass(frozen=True)
class Orders:
    """Derive from a format which channels should be neighbours.

    Attributes:
        scheme: format of a later pass.

    Raises:
        UsageError: no order changes what the format loses.
    """

    scheme: Format

    def __post_init__(self) -> None:
        fmt = self.scheme
        if self.aim == "groups" and fmt.strategy != "group":
            raise UsageError(
                f"permute_channels: scheme {fmt.name}: no order of channels changes what it loses; give a format with "
                "groups of scales (W4A16_G32), N of M weights (W8A16_2:4) or blocks (W8A16_B16x1@50)"
            )

    @property
    def aim(self) -> Aim:
        """Return the purpose that follows from the format."""
        if self._pattern is not None:
            return "n_of_m"
        return "groups" if self._blocks is None else "blocks"

    @property
    def goal(self) -> Goal:
        """Return the measure that a search raises."""
        if self._pattern is not None:
            return KeptOfGroups(self._pattern.kept)
        return SharedScales(not self.scheme.symmetric) if self._blocks is None else KeptBlocks()

    @property
    def columns(self) -> int:
        """Return how many neighbours of a row go together; 0 if the order of a weight's columns does not matter."""
        if self._blocks is not None:
            return self._blocks.width if self._blocks.width > 1 else 0
        return self.scheme.group_size if self._pattern is None else self._pattern.size

    @property
    def rows(self) -> int:
        """Return how many neighbours of a column go together; 0 if the order of a weight's rows does not matter."""
        return 0 if self._blocks is None else TILE_ROWS * self._blocks.tiles

    @property
    def _blocks(self) -> ColumnBlocks | None:
        return self.scheme.extra(ColumnBlocks)

    @property
    def _pattern(self) -> KeptOfGroup | None:
        return self.scheme.extra(KeptOfGroup)

    def find(self, graph: GraphModule, targets: str | Sequence[str], ignore: str | Sequence[str]) -> list[FreeLinears]:
        """Return the free sets whose order matters to linears that match, in dataflow order.

        Raises:
            UsageError: a pattern matches nothing, or no set is left; the reasons of some are given.
        """
        chosen = choose_sites(graph, "permute_channels", None, targets, ignore)
        place = {site.name: number for number, site in enumerate(linear_sites(graph))}
        found, reasons = [], []
        for free in free_sets(graph):
            read, written = (
                tuple(site for site in chosen if size and (site.weight_name, axis) in free.places)
                for axis, size in ((1, self.columns), (0, self.rows))
            )
            one = FreeLinears(free, read, written)
            if not one.sites:
                continue
            family, why = free.families[0], free.reason
            if not why and not any(self._runs_of(family, site) for site in one.sites):
                why = f"{family.count} channels are not several whole groups of neighbours in any of the linears"
            if why:
                reasons.append(f"{one.sites[0].name}: {why}")
            else:
                found.append(one)
        if not found:
            raise UsageError(
                "permute_channels: no channels of the matched linears can change places to any use"
                f"{': ' if reasons else ''}{'; '.join(reasons[:_NAMED])}"
            )
        return sorted(found, key=lambda one: place[one.sites[0].name])

    def _runs_of(self, family: Family, site: Site) -> list[int]:
        """Return where runs of a weight's columns or rows begin that are the channels, in whole groups."""
        both = ((1, self.columns), (0, self.rows))
        return [
            run
            for axis, size in both
            if size and (site.weight_name, axis) in family.places
            for run in _runs(family.places[site.weight_name, axis], size)
        ]

    def search_bytes(self, one: FreeLinears, rounds: int) -> tuple[int, int]:
        """Return the bytes that a search moves, and those that it holds, by the sizes of the linears."""
        features = sum(site.out_features for site in one.readers) + sum(site.in_features for site in one.writers)
        count, size = one.free.families[0].count, self.columns or self.rows
        entries = len(one.free.families) * count * min(features, FEATURES)
        return _BYTES * min(rounds, _TURNS * count // size) * entries, 32 * entries

    def features(self, one: FreeLinears, family: Family) -> int:
        """Return how many features :meth:`pieces` have together, by the sizes of the linears."""
        rows, width = self.rows or 1, 1 if self._blocks is None else self._blocks.width
        read = ((site, 1, self.columns, -(-site.out_features // rows)) for site in one.readers)
        written = ((site, 0, self.rows, site.in_features // width) for site in one.writers)
        return sum(
            len(_runs(family.places[site.weight_name, axis], size)) * each
            for site, axis, size, each in (*read, *written)
        )

    def pieces(
        self, graph: GraphModule, one: FreeLinears, family: Family, squares: Mapping[str, Tensor] | None
    ) -> Iterator[Piece]:
        """Yield what each weight holds of a family's channels, run after run of neighbours.

        Args:
            squares: mean squares of each linear's inputs, by its name; None where all inputs count the same.
        """
        for sites, axis, size in ((one.readers, 1, self.columns), (one.writers, 0, self.rows)):
            for site in sites:
                entries = family.places[site.weight_name, axis]
                runs = _runs(entries, size)
                if not runs:
                    continue
                weight = graph.get_parameter(site.weight_name).detach().float()
                costs = torch.ones(weight.shape[1]) if squares is None else squares[site.name].float()
                held = weight if self.aim == "groups" else weight.square() * costs
                for run in runs:
                    own = slice(run, run + len(entries))
                    if axis == 1:
                        yield self._columns_of(held[:, own], costs[own], weight.shape[1])
                    else:
                        yield self._rows_of(held[own])

    def _columns_of(self, held: Tensor, costs: Tensor, in_features: int) -> Piece:
        if self._blocks is None:
            return Piece(held.t().contiguous(), costs, self.columns)
        filled = pad(held, (0, 0, 0, -len(held) % self.rows)).view(-1, self.rows, held.shape[1]).sum(1)
        return Piece(filled.t().contiguous(), costs, self.columns, self._kept(in_features), across=True)

    def _rows_of(self, held: Tensor) -> Piece:
        assert self._blocks is not None
        in_features, width = held.shape[1], self._blocks.width
        whole = held[:, : in_features // width * width].reshape(len(held), -1, width).sum(2)
        return Piece(whole, torch.ones(len(held)), self.rows, self._kept(in_features))

    def _kept(self, in_features: int) -> float:
        """Return the share of the columns that each tile keeps."""
        return self.scheme.stored_columns(in_features) / in_features


def _runs(entries: NDArray[np.int64], size: int) -> list[int]:
    """Return where runs of neighbours begin that hold all channels, and more than one whole group each.

    Args:
        entries: of each channel, int64 [channels, entries of one].
    """
    if len(entries) % size or len(entries) <= size:
        return []
    steps = np.arange(len(entries))
    return [int(run[0]) for run in entries.T if run[0] % size == 0 and (run == run[0] + steps).all()]
