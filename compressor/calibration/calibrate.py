"""Run samples through a graph, and gather statistics of what each linear reads.

The graph runs segment by segment (:func:`compressor.graph.segments.segments`) over all samples, so that beside the
memory-mapped weights only one segment's working set, its statistics and the hidden states between two segments
are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.statistics import Statistic, pool_experts
from compressor.calibration.steps import MICRO_BATCH_TOKENS, calibration_steps, linears
from compressor.errors import CompressorError
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.graph.model import clone_graph
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import EXPERT, Site
from compressor.host.tensor_files import Spill
from compressor.numerics.products.bfloat16 import bfloat16_products

S = TypeVar("S", bound=Statistic)


class SegmentStore(Protocol):
    """Finished segments of a pass (:class:`compressor.pipeline.resume.Blocks`)."""

    def restore(self, graph: GraphModule, block: Sequence[Site]) -> bool:
        """Put the finished linears of a segment into the graph, if there are any; tell whether there were."""

    def keep(self, graph: GraphModule, block: Sequence[Site]) -> None:
        """Keep a segment's linears as they are now."""


@dataclass(frozen=True)
class CalibrationOptions:
    """Say how a :class:`CalibrationRun` runs its samples.

    Attributes:
        true_sequential: the next group of linears sees what became of the one before; else the next segment does.
        with_dense: also run another graph, or this one as it is now, in which these linears are dense, and show the
            statistics its inputs beside the current ones.  Experts see their own: the other graph may route a token
            elsewhere.
        micro_batch_tokens: tokens, or pixels, that run at once, at least one sample.
        store: finished segments.  Those that can be restored are, and their groups do not come; the samples run
            through them only when a later one needs it.
        spill: where hidden states lie; None keeps them in memory.
        row_weights: of the rows of each site's input, float32 [rows], the same within a group.  Statistics are shown
            each row times the root of its weight, so that squares and products count that often.
        rounded: products, of the graph and of the statistics, may round their factors to bfloat16
            (:mod:`compressor.numerics.products.bfloat16`).
    """

    true_sequential: bool = True
    with_dense: bool | GraphModule = False
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    store: SegmentStore | None = None
    spill: Spill | None = None
    row_weights: Mapping[str, Tensor] | None = None
    rounded: bool = False


class CalibrationRun(Generic[S]):
    """Run samples through a graph, and give each group of linears that share an input with a statistic of it.

    An expert's rows are those of its tokens; experts that saw few share their statistics
    (:func:`compressor.calibration.statistics.pool_experts`).

    :meth:`groups` yields in dataflow order, and between two of its steps the caller may replace the linears of the
    group that it was just given; what follows sees their new outputs.  With ``true_sequential`` that holds for the next
    group already, to which the samples run on, so the caller must leave alone what is in front of its group.
    Otherwise it holds for the next segment.

    Peak memory: the hidden states between two segments for all samples (twice ``with_dense``), or with
    ``true_sequential`` and no ``spill`` whatever is live in front of a group; one segment's weights and working set for
    one micro-batch; and one statistic (a segment's statistics without ``true_sequential``).

    Args:
        graph: a captured model.
        ids: int64 [samples, sequence]; of a plain module, its inputs, float32 [samples, ...]; sounds with their tokens.
        sites: the linears of interest, dense or packed.
        make_statistic: called with the width of a group's input.
        make_by_channel: called with channels and taps of a depthwise convolution; left out, it is one group as others.
    Raises:
        UsageError: the samples are not what the model reads, or longer than its positions.
    """

    def __init__(
        self,
        graph: GraphModule,
        ids: SampleInputs,
        sites: Sequence[Site],
        make_statistic: Callable[[int], S],
        options: CalibrationOptions = CalibrationOptions(),
        make_by_channel: Callable[[int, int], S] | None = None,
    ) -> None:
        self._graph, self._make_statistic, self._options = graph, make_statistic, options
        self._make_by_channel = make_by_channel
        self._names = [site.name for site in sites]
        batches = split_samples(graph, ids, options.micro_batch_tokens)
        self._run = SegmentRunner(graph, batches, options.spill, options.rounded)
        given = options.with_dense
        beside = given if isinstance(given, GraphModule) else clone_graph(graph) if given else None
        self._dense = None if beside is None else SegmentRunner(beside, batches, options.spill, options.rounded)
        self._dense_segments = [] if beside is None else segments(beside)
        self._done = 0  # segments that the hidden states have passed

    def groups(self) -> Iterator[tuple[list[Site], S]]:
        """Yield each group of sites that share an input, with its statistic.

        Raises:
            CompressorError: inputs of a site hold NaN or inf.
        """
        store = self._options.store
        for step in list(calibration_steps(self._graph, self._names, self._options.true_sequential)):
            cut = segments(self._graph)
            block = _sites(cut[step.index], step.names)
            if store is not None and store.restore(self._graph, block):
                continue
            self._advance(cut, step.index)
            for number, names in enumerate(step.rounds):
                yield from self._show(step.index, names, step.rounds[number + 1 :])
            self._run.release(segments(self._graph)[step.index])
            if self._dense is not None:
                self._dense.release(self._dense_segments[step.index])
            if store is not None:
                store.keep(self._graph, block)

    def _statistic(self, site: Site) -> S:
        if site.is_depthwise and self._make_by_channel is not None:
            return self._make_by_channel(site.out_features, site.in_features)
        return self._make_statistic(site.input_width)

    def _advance(self, cut: Sequence[Segment], index: int) -> None:
        """Run on to a segment's beginning."""
        for behind in range(self._done, index):
            self._run.advance(cut[behind])
            if self._dense is not None:
                self._dense.advance(self._dense_segments[behind])
        self._done = index

    def _show(
        self, index: int, names: Sequence[Sequence[str]], later: Sequence[Sequence[Sequence[str]]]
    ) -> Iterator[tuple[list[Site], S]]:
        """Run to the inputs of some groups, and yield them with their statistics."""
        segment = segments(self._graph)[index]
        groups = [_sites(segment, group) for group in names]
        ahead = None
        if self._options.true_sequential:
            ahead = [_sites(segment, group) for round_ in later for group in round_]
        statistics = [self._statistic(group[0]) for group in groups]
        rows = _read(self._run, segment, groups, ahead)
        # The dense graph may send a token to other experts: their rows are not beside each other.
        plain = [group for group in groups if group[0].module_class != EXPERT]
        if self._dense is None or not plain:
            both: Iterable[tuple[list[Tensor], list[Tensor]]] = ((xs, xs) for xs in rows)
        else:
            expected = None if ahead is None else [group for group in ahead if group[0].module_class != EXPERT]
            dense = _read(self._dense, self._dense_segments[index], plain, expected)
            both = ((xs, _beside(groups, xs, iter(ys))) for xs, ys in zip(rows, dense, strict=True))
        _gather(groups, statistics, both, self._options.row_weights, self._options.rounded)
        pool_experts(groups, statistics)
        while groups:  # pops, so that a statistic is freed when the caller is done with it
            yield groups.pop(0), statistics.pop(0)


def _sites(segment: Segment, names: Sequence[str]) -> list[Site]:
    """Look sites up: replacing a linear does not move the cuts, but the nodes are new."""
    sites = {site.name: site for site in linears(segment)}
    return [sites[name] for name in names]


def _beside(groups: Sequence[list[Site]], xs: Sequence[Tensor], dense: Iterator[Tensor]) -> list[Tensor]:
    """Return the dense graph's rows of each group; of experts, the rows themselves."""
    return [x if group[0].module_class == EXPERT else next(dense) for group, x in zip(groups, xs, strict=True)]


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
            if len(x):  # no token of this batch may have gone to an expert
                with bfloat16_products(rounded):
                    sink.add(x, y)


def _read(
    run: SegmentRunner, segment: Segment, groups: Sequence[list[Site]], later: Sequence[list[Site]] | None
) -> Iterator[list[Tensor]]:
    """Yield the rows that each group reads, [tokens, in], batch after batch; ``later`` groups follow from there."""
    inputs = {site.name: site.input for site in linears(segment)}
    wanted = [inputs[group[0].name] for group in groups]
    if later is None or run.spill is not None:  # memory is short: begin again
        found: Iterator[list[Tensor]] = (run.values(segment, i, wanted) for i in range(len(run.batches)))
    else:
        ahead = [inputs[group[0].name] for group in later]
        found = run.run_to(segment, wanted, ahead if segment.exit is None else [*ahead, segment.exit])
    return ([x.reshape(-1, x.shape[-1]) for x in values] for values in found)
