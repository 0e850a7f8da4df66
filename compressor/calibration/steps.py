"""Put the events of a calibration in order, for the run that executes them and for the plan that prices them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch.fx import GraphModule

from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site, family, group_by_input

MICRO_BATCH_TOKENS = 2048
"""Tokens that run at once."""


@dataclass(frozen=True)
class CalibrationStep:
    """Name what becomes of the linears of one segment.

    Attributes:
        index: of the segment; the samples run on to its beginning first.
        rounds: runs of the samples inside the segment, one after another; each shows the statistics of some groups of
            linears that share an input, by the linears' names, and these may be replaced before the next round.
    """

    index: int
    rounds: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def names(self) -> list[str]:
        """All linears of the segment, round by round."""
        return [name for round_ in self.rounds for group in round_ for name in group]


def calibration_steps(graph: GraphModule, names: Collection[str], true_sequential: bool) -> Iterator[CalibrationStep]:
    """Yield a step for each segment that has linears of interest, in dataflow order.

    Args:
        names: of the linears, dense or packed.
        true_sequential: each group of linears that share an input gets a round of its own, so that it sees what became
            of the groups before (the experts of one weight share one round); otherwise a segment's groups share one.
    """
    chosen = frozenset(names)
    for index, segment in enumerate(segments(graph)):
        groups = group_by_input(site for site in linears(segment) if site.name in chosen)
        named = [tuple(site.name for site in group) for group in groups]
        if named:
            families = [family(group[0]) for group in groups]
            apart = groupby(zip(families, named, strict=True), key=itemgetter(0))
            rounds = tuple(tuple(group for _, group in same) for _, same in apart)
            yield CalibrationStep(index, rounds if true_sequential else (tuple(named),))


def linears(segment: Segment) -> tuple[Site, ...]:
    """Return a segment's linears, dense and packed."""
    return (*segment.sites, *segment.packed)
