"""Foresee what a search for an architecture takes: samples that run through the model, and graphs that are timed."""

from __future__ import annotations

from torch.fx import GraphModule

from compressor.pipeline.structured.architecture import alike
from compressor.pipeline.structured.architecture_formats import Problem
from compressor.pipeline.structured.costs.limits import AT_ONCE
from compressor.pipeline.structured.costs.times import single_changes
from compressor.search.space import Space

_TURNS = 8  # of the programme, where time is limited; each times a few architectures and the whole one
_WHOLES = 9  # architectures that a turn scores


def searched_samples(space: Space, samples: int, held_out: float, is_trained: bool, is_timed: bool) -> float:
    """Return the samples that run through the whole graph, each time counted.

    All run to sort channels, and to train.  Those held out run through half of the graph for each alternative alone,
    for each architecture that is scored as a whole, and as sub-layers are ranked that may go.

    Args:
        samples: of which a share is held out.
    """
    singles, able = sum(len(row) - 1 for row in space), sum(any(not one.stays for one in row) for row in space)
    wholes, ranked = _WHOLES * (_TURNS if is_timed else 1), able * (able + 1) / 2
    halves = singles + wholes + ranked
    return samples * ((1 - held_out) * (1 + is_trained) + held_out * (1 + halves / 2))


def timed_graphs(graph: GraphModule, given: Problem) -> int:
    """Return the graphs that are timed: with each change in sub-layers that are alike, and the best as wholes."""
    changes = single_changes(alike(graph, given.parts.layers, given.joined), given.joined)
    return 1 + len(changes) + (1 + AT_ONCE) * _TURNS
