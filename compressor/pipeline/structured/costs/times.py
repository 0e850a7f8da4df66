"""Time architectures on the target's kernels, a decoder's step or one image, and tell what single changes save.

    seconds of an architecture - seconds of the whole = sum of what its changes add, in least squares

First each change is made in all sub-layers that are alike; then a search times its best architectures as wholes, which
corrects what noise made cheap, and what does not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.structured.architecture import Picks, alike, built
from compressor.search.programme import Limit
from compressor.search.space import Space, SubLayer

_OF_WHOLES = 3  # weight of architectures that are timed as wholes, among which the next choice lies
Choice: TypeAlias = tuple[int, ...]
"""The place of each sub-layer's alternative in the space."""


@dataclass(frozen=True)
class Costing:
    """Hold what alternatives are costed for.

    Attributes:
        pass_name: for messages.
        layers, space: what there is to choose.
        fmt: of the sub-layers' linears; None leaves them dense.
        decides: plain data that determine the graph, part of keys in the cache.
    """

    pass_name: str
    layers: Sequence[SubLayer]
    space: Space
    fmt: Format | None
    decides: object = None

    @property
    def whole(self) -> Picks:
        """Return the architecture that leaves all as it is."""
        return [row[0] for row in self.space]

    def picks(self, choice: Choice) -> Picks:
        """Return the alternatives of a choice."""
        return [row[place] for row, place in zip(self.space, choice, strict=True)]

    def key(self, ctx: Context, what: object) -> list[object]:
        """Return plain data that determine costs on a target."""
        labels = [[one.label for one in row] for row in self.space]
        return [what, labels, self.decides, ctx.target, None if self.fmt is None else self.fmt.name]


def unit_of(graph: GraphModule) -> str:
    """Name what a model's predictions are of, with its article: a token, or an image."""
    info: ModelInfo = graph.meta["model"]
    return "an image" if info.kind == "module" else "a token"


class Times:
    """Seconds of a step or an image of architectures, as they were timed, and what alternatives add to them.

    Args:
        graph: whole.
        share: of the whole graph's time that is allowed.
    Raises:
        UsageError: nothing here tells times.

    Attributes:
        taken: seconds of each architecture that was timed.
        repeated: at first and when timed again, of those that were.
    """

    def __init__(self, graph: GraphModule, ctx: Context, given: Costing, share: float) -> None:
        self._graph, self._ctx, self._given, self._share, self._how = graph, ctx, given, share, ""
        self._what = unit_of(graph) if graph.meta["model"].kind == "module" else "a step"
        self._whole, self.taken = (0,) * len(given.space), dict[Choice, float]()
        self.repeated = dict[Choice, tuple[float, float]]()
        self._groups = alike(graph, given.layers, given.space)
        if ctx.step_seconds is None:
            raise UsageError(
                f"{given.pass_name}: latency: what {self._what} takes is not known here; compress through "
                "compressor.compress or the command line, or limit weight_bytes or parameters"
            )
        self._alone = single_changes(self._groups, given.space)
        self.time(self._alone)

    def time(self, several: Sequence[Choice], what: str = "seconds") -> None:
        """Time architectures in turns with the whole one; what is in the cache under this name is not timed again."""
        timer, given = self._ctx.step_seconds, self._given
        assert timer is not None

        def make() -> dict[str, torch.Tensor]:
            wanted = map(given.picks, (self._whole, *several))
            seconds, how = timer([built(self._graph, given.pass_name, picks, given.fmt) for picks in wanted])
            return {"seconds": torch.tensor(seconds, dtype=torch.float64), "how": torch.tensor(list(how.encode()))}

        decides = given.key(self._ctx, [what, [*map(list, several)]])
        known = cached_tensors(self._graph, self._ctx, given.pass_name, decides, make)
        first, *others = known["seconds"].tolist()
        level = self.taken.setdefault(self._whole, first)  # the machine's own comes and goes, so shares are kept
        self.taken |= {one: level * seconds / first for one, seconds in zip(several, others, strict=True)}
        self._how = bytes(known["how"].tolist()).decode()

    def limit(self) -> Limit:
        """Return the limit of time, in seconds, by all that has been timed."""
        columns = dict[tuple[int, str], int]()
        places = [[0] * len(row) for row in self._given.space]  # of each alternative its column, behind those as is
        for number, members in enumerate(self._groups):
            for i in members:
                for place, one in enumerate(self._given.space[i][1:], 1):
                    places[i][place] = columns.setdefault((number, one.label), len(columns) + 1)
        counts = np.zeros((len(self.taken), len(columns) + 1))
        for row, choice in zip(counts, self.taken, strict=True):
            np.add.at(row, [places[i][place] for i, place in enumerate(choice)], 1)
        first = self.taken[self._whole]
        added = np.array([*self.taken.values()]) - first
        weights = np.array([1 if choice in self._alone else _OF_WHOLES for choice in self.taken])
        found = np.append(0.0, np.linalg.lstsq(counts[:, 1:] * weights[:, None], added * weights, rcond=None)[0])
        return Limit([found[row].tolist() for row in places], first, self._share * first, " s")

    def confirm(self, choice: Choice) -> None:
        """Time an architecture once more: it was chosen since it seemed quick, and counts with its mean from now on."""
        first = self.taken[choice]
        self.time([choice], "again")
        self.repeated[choice] = first, self.taken[choice]
        self.taken[choice] = sum(self.repeated[choice]) / 2

    def told(self, choice: Choice, parts: float) -> str:
        """Say what a step or an image of a confirmed architecture was foreseen to take, and took when timed again.

        Args:
            parts: seconds that its parts were foreseen to add up to, before any architecture was timed as a whole.
        """
        (foreseen, taken), whole = self.repeated[choice], self.taken[self._whole]
        return (
            f"{self._given.pass_name}: {self._what} is foreseen to take {1e3 * foreseen:.4g} ms, and takes "
            f"{1e3 * taken:.4g} ms ({foreseen / taken - 1:+.1%}), {taken / whole:.3f} of the model's "
            f"{1e3 * whole:.4g} ms; its parts, timed apart, added up to {parts / whole:.3f} ({self._how})"
        )


def single_changes(groups: Sequence[Sequence[int]], space: Space) -> list[Choice]:
    """Return the architectures with one change in all sub-layers that are alike but the first of them.

    What stands beside the changed ones cancels in the difference, and no difference is taken for more than it is.
    """
    found = []
    for members in groups:
        for label in dict.fromkeys(one.label for i in members for one in space[i][1:]):
            able = [i for i in members if any(one.label == label for one in space[i])]
            choice = [0] * len(space)
            for i in able[1:] or able:
                choice[i] = next(place for place, one in enumerate(space[i]) if one.label == label)
            found.append(tuple(choice))
    return found
