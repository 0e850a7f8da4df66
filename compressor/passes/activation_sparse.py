"""Activation sparsity without training: small inputs are skipped, and with them their columns of the weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.segment_runner import SegmentRunner, split_samples
from compressor.calibration.steps import MICRO_BATCH_TOKENS
from compressor.errors import UsageError
from compressor.formats.extras import SkippedInputs
from compressor.formats.packing import PackedWeight, dequantize, meta_packed, skip_inputs
from compressor.graph.rewrite import packed_weight, replace_packed, set_parameter
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import EXPERT, Site, packed_sites
from compressor.numerics.sparsity.input_thresholds import MOST_SHARE, STEP, Sizes, greedy_shares, skipped
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import choose_sites

_ROWS = 4096  # inputs of a linear that thresholds are chosen on


@dataclass(frozen=True)
class ActivationSparse(Pass):
    """Skip small inputs of packed linears, and do not read their columns of the weight.

    Put it after the passes that quantise.  Thresholds are quantiles over the calibration samples; one token reads only
    what is left, several tokens at once multiply by zeros.  How much other text skips may differ.

    Attributes:
        sparsity: share of the weights that a token does not read, above 0 and at most 0.95.
        targets: class names, module names or ``re:`` patterns of the packed linears.
        ignore: patterns of linears to leave as they are.
        allocate: ``greedy`` lets each linear of a block skip what adds the least error to its outputs; ``uniform``
            skips the same share everywhere.
        weight_aware: weight inputs by the norms of their columns of the weight.
    """

    sparsity: float
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    allocate: Literal["greedy", "uniform"] = "greedy"
    weight_aware: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.sparsity <= MOST_SHARE:
            raise UsageError(
                f"activation_sparse: sparsity {self.sparsity:g} is a share; give more than 0, at most {MOST_SHARE:g}"
            )

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse linears that are not packed, or in formats whose inputs no kernel skips."""
        self._choose(graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Store the matched linears by columns, and give them thresholds; their records say what that adds."""
        total = done = 0.0
        for site, share, error in self.limit(graph, ctx):
            packed, size = packed_weight(graph, site), site.out_features * site.in_features
            extend_record(ctx, site.name, packed, f"skips {share:.1%} of its inputs, an error of {error:.2g}")
            graph.meta.setdefault("read_shares", {})[site.weight_name] = 1 - share
            total, done = total + size, done + share * size
        ctx.notes.append(f"activation_sparse: a token of the samples skips {done / total:.1%} of the weights")
        graph.recompile()
        return graph

    def limit(self, graph: GraphModule, ctx: Context) -> Iterator[tuple[Site, float, float]]:
        """Store the matched linears by columns, choose their thresholds, and yield them one after another.

        Yields:
            the linear, the share of its inputs that is skipped, and the error of its outputs.
        """
        chosen, samples = self._choose(graph), ctx.calibration("activation_sparse")
        for site in chosen:
            replace_packed(graph, site, skip_inputs(packed_weight(graph, site), torch.zeros(site.in_features)))
        stream = SegmentRunner(graph, split_samples(graph, samples.ids, MICRO_BATCH_TOKENS), ctx.spill)
        left = len(chosen)
        with ctx.reporter.task("activation_sparse", left) as task:
            for segment in segments(graph):
                mine = [site for site in chosen if site.node in segment.nodes]
                for found in self._skip(graph, stream, segment, mine):
                    yield found
                    task.advance()
                left -= len(mine)
                if segment.exit is None or not left:
                    break
                stream.advance(segment)

    def _skip(
        self, graph: GraphModule, stream: SegmentRunner, segment: Segment, sites: Sequence[Site]
    ) -> list[tuple[Site, float, float]]:
        """Choose the thresholds of a segment's linears: each with what it skips, and the error of its outputs."""
        if not sites:
            return []
        every = [stream.values(segment, i, [site.input for site in sites]) for i in range(len(stream.batches))]
        rows = [torch.cat([x.flatten(0, -2) for x in values]) for values in zip(*every, strict=True)]
        rows = [some[:: -(-len(some) // _ROWS)] for some in rows]
        weights = [dequantize(packed_weight(graph, site)) for site in sites]
        norms = [w.norm(dim=0) if self.weight_aware else torch.ones(w.shape[1]) for w in weights]
        sizes = [Sizes(*pair) for pair in zip(rows, norms, strict=True)]
        exit_node = segment.exit or graph.graph.output_node().args[0][0]  # type: ignore[index]

        def outputs(shares: Sequence[float]) -> Tensor:
            for site, some, share in zip(sites, sizes, shares, strict=True):
                set_parameter(graph, f"{site.name}.thresholds", some.thresholds(share))
            return stream.values(segment, 0, [exit_node])[0]  # type: ignore[list-item]

        def error(shares: Sequence[float]) -> float:
            return float((outputs(shares) - whole).double().square().sum())

        whole, shares = outputs([0.0] * len(sites)), [self.sparsity] * len(sites)
        if self.allocate == "greedy" and len(sites) > 1:
            shares = greedy_shares([w.numel() for w in weights], self.sparsity, error)
        found = []
        for site, weight, x, some, share in zip(sites, weights, rows, sizes, shares, strict=True):
            limit = some.thresholds(share)
            set_parameter(graph, f"{site.name}.thresholds", limit)
            lost = torch.where(x.abs() < limit, x, 0.0) @ weight.T
            found.append((site, skipped(x, limit), float(lost.square().sum() / (x @ weight.T).square().sum())))
        return found

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        plans = []
        tries = MOST_SHARE / STEP * len(packed_sites(graph)) if self.allocate == "greedy" else 1
        for site in self._choose(graph):
            old, shape = packed_weight(graph, site), (site.out_features, site.in_features)
            packed = meta_packed(*shape, old.format.with_extra(SkippedInputs()))
            replace_packed(graph, site, packed)
            size = shape[0] * shape[1]
            tokens = MICRO_BATCH_TOKENS
            work = {"matmul_flop": 2 * tries * tokens * size, "dequantize_element": tries * size}
            needs = CalibrationNeeds(true_sequential=True, with_dense=False, hessian=False)
            note = f"about {self.sparsity:.0%} of its inputs are skipped"
            plans.append(
                SitePlan(site.name, *shape, packed.format.name, old.nbytes, packed.nbytes, note, work, 16 * size, needs)
            )
        return plans

    def _choose(self, graph: GraphModule) -> list[Site]:
        """Return the linears that skip inputs."""
        if not packed_sites(graph):
            raise UsageError("activation_sparse: no linear is packed; put it after the passes that quantise")
        chosen = choose_sites(graph, "activation_sparse", None, self.targets, self.ignore, packed_sites)
        for site in chosen:
            if site.module_class == EXPERT:
                raise UsageError(
                    f"activation_sparse: {site.name} is an expert, which skips no inputs; `ignore` experts"
                )
            fmt = packed_weight(graph, site).format
            if fmt.extra(SkippedInputs) is not None:
                raise UsageError(f"activation_sparse: {site.name} skips inputs already; match each linear once")
            try:
                fmt.with_extra(SkippedInputs())
            except UsageError as error:
                raise UsageError(
                    f"activation_sparse: {site.name} is stored as {fmt.name}: {error}; quantise it to W8A16 or "
                    "W4A16_G128, or `ignore` it"
                ) from error
        return chosen


def extend_record(ctx: Context, name: str, packed: PackedWeight, note: str) -> None:
    """Say in the record of the pass that packed a linear how it is stored now."""
    for place, record in enumerate(ctx.records):
        if record.site == name and record.format:  # a rotation's matrix has no record
            notes = "; ".join(filter(None, [record.note, note]))
            ctx.records[place] = replace(record, format=packed.format.name, bytes_after=packed.nbytes, note=notes)
