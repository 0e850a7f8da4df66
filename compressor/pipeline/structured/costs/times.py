"""Time alternatives on the target's kernels: a decoder's step, or one image, with a change in all sub-layers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def key(self, ctx: Context, what: str) -> list[object]:
        """Return plain data that determine costs on a target."""
        labels = [[one.label for one in row] for row in self.space]
        return [what, labels, self.decides, ctx.target, None if self.fmt is None else self.fmt.name]


def unit_of(graph: GraphModule) -> str:
    """Name what a model's predictions are of, with its article: a token, or an image."""
    info: ModelInfo = graph.meta["model"]
    return "an image" if info.kind == "module" else "a token"


def _run_of(graph: GraphModule) -> str:
    """Name what is timed of a model, with its article."""
    return unit_of(graph) if graph.meta["model"].kind == "module" else "a step"


def times(graph: GraphModule, ctx: Context, given: Costing, share: float) -> tuple[Limit, str]:
    """Return the limit of time, in seconds a step or an image, and in words how times were found.

    A change is made in all sub-layers that are alike but the first, and the difference to the whole graph's step is
    divided by their number: what stands beside them cancels.  No difference is taken for more than it is.

    Args:
        share: of the whole graph's time.
    Raises:
        UsageError: nothing here tells times.
    """
    timer = ctx.step_seconds
    if timer is None:
        raise UsageError(
            f"{given.pass_name}: latency: what {_run_of(graph)} takes is not known here; compress through "
            "compressor.compress or the command line, or limit weight_bytes or parameters"
        )
    changes = _changes(given.space, alike(graph, given.layers, given.space))

    def make() -> dict[str, torch.Tensor]:
        wanted = [given.whole]
        for places, _, label in changes:
            picks = list(given.whole)
            for i in places:
                picks[i] = next(one for one in given.space[i] if one.label == label)
            wanted.append(picks)
        seconds, how = timer([built(graph, given.pass_name, picks, given.fmt) for picks in wanted])
        return {"seconds": torch.tensor(seconds, dtype=torch.float64), "how": torch.tensor(list(how.encode()))}

    known = cached_tensors(graph, ctx, given.pass_name, given.key(ctx, "seconds"), make)
    first, *others = known["seconds"].tolist()
    sizes = [[0.0] * len(row) for row in given.space]
    for (places, members, label), seconds in zip(changes, others, strict=True):
        for i in members:
            for place, one in enumerate(given.space[i]):
                if one.label == label:
                    sizes[i][place] = (seconds - first) / len(places)
    return Limit(sizes, first, share * first, " s"), bytes(known["how"].tolist()).decode()


def _changes(space: Space, groups: Sequence[list[int]]) -> list[tuple[list[int], list[int], str]]:
    """List what is timed: the sub-layers that change, those that are alike, whose times it tells, and to what."""
    found: list[tuple[list[int], list[int], str]] = []
    for members in groups:
        for label in dict.fromkeys(one.label for i in members for one in space[i][1:]):
            able = [i for i in members if any(one.label == label for one in space[i])]
            found.append((able[1:] or able, members, label))
    return found


def checked_time(graph: GraphModule, ctx: Context, given: Costing, picks: Picks, foreseen: float, how: str) -> str:
    """Say what a step or an image of the architecture was foreseen to take, and takes as it is built."""
    assert ctx.step_seconds is not None
    both = [built(graph, given.pass_name, one, given.fmt) for one in (given.whole, picks)]
    (whole, chosen), _ = ctx.step_seconds(both)
    off = foreseen / chosen - 1
    return (
        f"{given.pass_name}: {_run_of(graph)} is foreseen to take {1e3 * foreseen:.4g} ms, and takes "
        f"{1e3 * chosen:.4g} ms ({off:+.1%}), {chosen / whole:.3f} of the model's {1e3 * whole:.4g} ms ({how})"
    )
