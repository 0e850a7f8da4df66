"""Samples through the graph: statistics of what each linear reads.

The graph runs segment by segment (:func:`compressor.graph.segments.segments`) over all samples, so that beside the
memory-mapped weights only one segment's working set, its statistics and the hidden states between two segments
are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import Stream, split_samples
from compressor.calibration.statistics import Statistic
from compressor.errors import CompressorError
from compressor.graph.model import clone_graph
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site, group_by_input
from compressor.host.tensor_files import Spill
from compressor.numerics.bfloat16 import bfloat16_products

S = TypeVar("S", bound=Statistic)


class SegmentStore(Protocol):
    """Finished segments of a pass (:class:`compressor.pipeline.resume.Blocks`)."""

    def restore(self, graph: GraphModule, block: Sequence[Site]) -> bool:
        """Put the finished linears of a segment into the graph, if there are any; tell whether there were."""

    def keep(self, graph: GraphModule, block: Sequence[Site]) -> None:
        """Keep a segment's linears as they are now."""


def stream(
    graph: GraphModule,
    ids: Tensor,
    sites: Sequence[Site],
    make_statistic: Callable[[int], S],
    *,
    true_sequential: bool = True,
    with_dense: bool | GraphModule = False,
    micro_batch_tokens: int = 2048,
    blocks: SegmentStore | None = None,
    spill: Spill | None = None,
    row_weights: Mapping[str, Tensor] | None = None,
    rounded: bool = False,
) -> Iterator[tuple[list[Site], S]]:
    """Run samples through the graph and yield each group of sites that share an input, with its statistic.

    Groups come in dataflow order.  The caller may replace the group's linears before it asks for the next one:
    what follows then sees their new outputs.  With ``true_sequential`` that holds for the next group already,
    to which the samples run on; the caller must leave alone what is in front of the group.  Otherwise it holds for
    the next segment.

    Peak memory: the hidden states between two segments for all samples (twice ``with_dense``), or with
    ``true_sequential`` and no ``spill`` whatever is live in front of a group; one segment's weights and working set for
    one micro-batch; and one statistic (a segment's statistics without ``true_sequential``).

    Args:
        graph: a captured model.
        ids: int64 [samples, sequence]; of a plain module, its inputs, float32 [samples, ...].
        sites: the linears of interest, dense or packed.
        make_statistic: called with the width of a group's input.
        with_dense: also run another graph, or this one as it is now, in which these linears are dense, and show the
            statistics its inputs beside the current ones.
        micro_batch_tokens: tokens, or pixels, that run at once, at least one sample.
        blocks: finished segments.  Those that can be restored are, and their groups do not come; the samples run
            through them only when a later one needs it.
        spill: where hidden states lie; None keeps them in memory.
        row_weights: of the rows of each site's input, float32 [rows], the same within a group.  Statistics are shown
            each row times the root of its weight, so that squares and products count that often.
        rounded: products, of the graph and of the statistics, may round their factors to bfloat16
            (:mod:`compressor.numerics.bfloat16`).
    Raises:
        UsageError: the samples are not what the model reads, or longer than its positions.
        CompressorError: inputs of a site hold NaN or inf.
    """
    batches = split_samples(graph, ids, micro_batch_tokens)
    run = Stream(graph, batches, spill, rounded)
    beside = with_dense if isinstance(with_dense, GraphModule) else clone_graph(graph) if with_dense else None
    dense = Stream(beside, batches, spill, rounded) if beside is not None else None
    dense_segments = segments(dense.graph) if dense else []
    names = {site.name for site in sites}
    done = 0  # segments that the hidden states have passed
    for index in range(len(segments(graph))):
        # Replacing a linear does not move the cuts, but the nodes are new: look the segment up again.
        block = [site for site in _linears(segments(graph)[index]) if site.name in names]
        if not block or (blocks is not None and blocks.restore(graph, block)):
            continue
        for behind in range(done, index):
            run.advance(segments(graph)[behind])
            if dense:
                dense.advance(dense_segments[behind])
        done = index
        wanted = [site.name for site in block]
        while wanted:
            segment = segments(graph)[index]
            groups = group_by_input(site for site in _linears(segment) if site.name in wanted)
            groups, later = (groups[:1], groups[1:]) if true_sequential else (groups, None)
            statistics = [make_statistic(group[0].in_features) for group in groups]
            rows = _read(run, segment, groups, later)
            both = zip(rows, _read(dense, dense_segments[index], groups, later), strict=True) if dense else None
            _gather(groups, statistics, both or ((xs, xs) for xs in rows), row_weights, rounded)
            wanted = [name for name in wanted if not any(name == site.name for group in groups for site in group)]
            while groups:  # pops, so that a statistic is freed when the caller is done with it
                yield groups.pop(0), statistics.pop(0)
        run.release(segments(graph)[index])
        if dense:
            dense.release(dense_segments[index])
        if blocks is not None:
            blocks.keep(graph, block)


class _Weighted:
    """Rows on their way into a statistic, each times the square root of its weight."""

    def __init__(self, statistic: Statistic, weights: Tensor) -> None:
        self._statistic, self._roots = statistic, weights.sqrt()[:, None]  # of the rows that are still to come

    def add(self, x: Tensor, dense: Tensor) -> None:
        roots, self._roots = self._roots[: len(x)], self._roots[len(x) :]
        weighted = x * roots
        self._statistic.add(weighted, weighted if dense is x else dense * roots)


def _gather(
    groups: Sequence[list[Site]],
    statistics: Sequence[Statistic],
    batches: Iterable[tuple[list[Tensor], list[Tensor]]],
    row_weights: Mapping[str, Tensor] | None,
    rounded: bool,
) -> None:
    """Show the statistic of each group the rows of all batches, and those of the dense graph beside them."""
    sinks: Sequence[Statistic] = statistics
    if row_weights is not None:
        pairs = zip(groups, statistics, strict=True)
        sinks = [_Weighted(statistic, row_weights[group[0].name]) for group, statistic in pairs]
    for xs, ys in batches:
        for group, sink, x, y in zip(groups, sinks, xs, ys, strict=True):
            # The sum is quicker to look at; it may overflow where no element does.
            if not (bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())):
                raise CompressorError(
                    f"{group[0].name}: its inputs hold NaN or inf on the calibration samples; check the checkpoint in "
                    "front of it, and the samples"
                )
            with bfloat16_products(rounded):
                sink.add(x, y)


def _read(
    run: Stream, segment: Segment, groups: Sequence[list[Site]], later: Sequence[list[Site]] | None
) -> Iterator[list[Tensor]]:
    """The rows that each group reads, [tokens, in], batch after batch; ``later`` groups will follow from there."""
    inputs = {site.name: site.input for site in _linears(segment)}
    wanted = [inputs[group[0].name] for group in groups]
    if later is None or run.spill is not None:  # memory is short: begin again
        found: Iterator[list[Tensor]] = (run.values(segment, i, wanted) for i in range(len(run.batches)))
    else:
        ahead = [inputs[group[0].name] for group in later]
        found = run.stage(segment, wanted, ahead if segment.exit is None else [*ahead, segment.exit])
    return ([x.reshape(-1, x.shape[-1]) for x in values] for values in found)


def _linears(segment: Segment) -> tuple[Site, ...]:
    return (*segment.sites, *segment.packed)
