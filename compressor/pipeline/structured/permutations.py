"""Search an order of each free set of channels, put them in it, check the outputs, and record what it gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.segment_runner import SegmentRunner, run_outputs, split_samples
from compressor.calibration.statistics import MeanSquares
from compressor.errors import CompressorError
from compressor.graph.dependencies.channels import Family
from compressor.graph.dependencies.permuting import moved, permute
from compressor.graph.kinds.encoder_decoder import Batch, Pair
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.sites import linear_sites
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.structured.orders import FEATURES, FreeLinears, Orders
from compressor.progress import Silent

_CHECKED, _TOLERANCE = 2, 1e-4  # batches whose outputs are compared, and their largest relative difference
_TOKENS, _SOUND = 16, 4000  # of a random batch, at most: tokens, and samples of a sound


@dataclass(frozen=True)
class Permutation:
    """Permute the channels of a graph for a later pass.

    Attributes:
        orders: what for.
        rounds: exchanges between clusters that a search tries at most.
        uses_inputs: whether what inputs a weight meets counts, beside the weight.
        step: the pass, whose options decide what a cache holds.
    """

    orders: Orders
    rounds: int
    uses_inputs: bool
    step: Any

    def run(self, graph: GraphModule, ctx: Context, found: Sequence[FreeLinears]) -> None:
        """Search, permute and record.

        Raises:
            CompressorError: the outputs are not what they were.
        """
        learnt_from = ctx.calibration("permute_channels").sha256 if self.uses_inputs else ""
        decides = [learnt_from, repr(self.step), [site.name for one in found for site in one.sites]]
        before = self._outputs(graph, ctx)
        results = cached_tensors(
            graph, ctx, "permute_channels", decides, lambda: self._search(clone_graph(graph), ctx, found)
        )
        for number, one in enumerate(found):
            for head, family in enumerate(one.free.families):
                permute(graph, family, results[f"{number}.{head}"])
        self._check(before, self._outputs(graph, ctx))
        self._record(graph, ctx, found, [results[f"{number}.worth"] for number in range(len(found))])

    def _search(self, graph: GraphModule, ctx: Context, found: Sequence[FreeLinears]) -> dict[str, Tensor]:
        """Return the order of each family, and what each set is worth before and after, and in all.

        Where both rows and columns matter, sets are permuted one after another: the rows of a block may be channels of
        one set, and its columns of another.
        """
        is_chained = bool(self.orders.rows and self.orders.columns)
        squares = self._squares(graph, ctx, found) if self.uses_inputs else None
        results = {}
        with ctx.reporter.task("permute_channels", len(found)) as task:
            for number, one in enumerate(found):
                worth = torch.zeros(3, dtype=torch.float64)
                for head, family in enumerate(one.free.families):
                    order, values = self._best(graph, one, family, squares)
                    if is_chained:
                        permute(graph, family, order)
                        _follow(graph, family, order, squares or {})
                    results[f"{number}.{head}"] = order
                    worth += values
                results[f"{number}.worth"] = worth
                task.advance()
        return results

    def _best(
        self, graph: GraphModule, one: FreeLinears, family: Family, squares: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return an order, the present one if none is better, and float64 [3]: worth before and after, and the most."""
        goal, identity = self.orders.goal, torch.arange(family.count)
        step = -(-self.orders.features(one, family) // FEATURES)
        seen = [piece.sampled(step) for piece in self.orders.pieces(graph, one, family, squares)]
        order = goal.search(seen, self.rounds)
        worth = torch.zeros(3, dtype=torch.float64)
        # Of more features than a search looks at, each weight's are made anew: all of them at once may not fit.
        for piece in seen if step == 1 else self.orders.pieces(graph, one, family, squares):
            all_of_it = float(piece.values.sum(1, dtype=torch.float64).sum())
            values = [goal.value(piece, identity), goal.value(piece, order), all_of_it]
            worth += torch.tensor(values, dtype=torch.float64)
        if worth[1] <= worth[0]:
            return identity, worth[[0, 0, 2]]
        return order, worth

    def _squares(self, graph: GraphModule, ctx: Context, found: Sequence[FreeLinears]) -> dict[str, Tensor]:
        """Return the mean squares of the inputs of all linears that count."""
        names = {site.name for one in found for site in one.sites}
        sites = [site for site in linear_sites(graph) if site.name in names]
        options = CalibrationOptions(true_sequential=False, spill=ctx.spill)
        run = CalibrationRun(graph, ctx.calibration("permute_channels").ids, sites, MeanSquares, options)
        return {site.name: statistic.value for group, statistic in run.groups() for site in group}

    def _outputs(self, graph: GraphModule, ctx: Context) -> list[Tensor]:
        """Return what the model makes of the first samples, or of random inputs where there are none."""
        if ctx.samples is not None:
            batches = split_samples(graph, ctx.samples.ids, 1)[:_CHECKED]
        elif graph.meta["model"].kind == "module":
            return _outputs_of_example(graph)
        else:
            batches = _random_batches(graph.meta["model"])
        return [value.clone() for value in run_outputs(SegmentRunner(graph, batches, ctx.spill), Silent())]

    def _check(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        for old, new in zip(before, after, strict=True):
            error = float((new - old).double().norm() / old.double().norm().clamp(min=1e-30))
            if not error <= _TOLERANCE:
                raise CompressorError(
                    f"permute_channels: outputs differ by {error:.2g} of their size once channels have changed places; "
                    "the graph holds an operator that tells channels apart where its rule says that it does not: "
                    "please report it, and leave the pass out or name linears in `ignore` meanwhile"
                )

    def _record(self, graph: GraphModule, ctx: Context, found: Sequence[FreeLinears], worth: Sequence[Tensor]) -> None:
        """Record what each set gained, at its first linear, and all of them in a note."""
        notes: dict[str, list[str]] = {}
        for one, values in zip(found, worth, strict=True):
            notes.setdefault(one.sites[0].name, []).append(f"{one.size}: {self._gain(values)}")
        for site in linear_sites(graph):
            if site.name in notes:
                weight = graph.get_parameter(site.weight_name)
                size = weight.numel() * weight.element_size()
                text = "; ".join(notes[site.name])
                ctx.records.append(SiteRecord(site.name, "permute_channels", "", size, size, 0.0, "weight", note=text))
        ctx.notes.append(f"permute_channels: {len(found)} sets of channels: {self._gain(torch.stack([*worth]).sum(0))}")

    def _gain(self, worth: Tensor) -> str:
        before, after, most = worth.tolist()
        if self.orders.aim == "groups":
            return f"the expected error of rounding falls by {1 - after / before if before else 0:.2%}"
        most = most or 1.0
        return f"kept are {after / most:.2%} of what it holds in all, before {before / most:.2%}"


def _random_batches(info: ModelInfo) -> list[Batch]:
    """Return random tokens, the same for the same model, int64 [1, 16] each, beside noise for a model of speech."""
    generator, source = torch.Generator().manual_seed(0), info.encoder_source
    limits = (_TOKENS, info.max_positions, 0 if source is None or info.hears else source.max_positions)
    shape = (_CHECKED, min(limit for limit in limits if limit))
    ids = torch.split(torch.randint(info.vocab_size, shape, generator=generator), 1)
    if source is None or not info.hears:
        return [*ids]
    return [Pair(0.1 * torch.randn(1, *source.sized(_SOUND), generator=generator), each) for each in ids]


def _outputs_of_example(graph: GraphModule) -> list[Tensor]:
    """Return a plain module's outputs for the example that it was captured with, with noise in the place of zeros."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(x.shape, generator=generator) if x.is_floating_point() and not x.any() else x.detach()
        for x in graph.meta["inputs"][0]
    ]
    with torch.no_grad():
        found = Interpreter(graph).run(*inputs)
    return [found] if isinstance(found, Tensor) else [*found]


def _follow(graph: GraphModule, family: Family, order: Tensor, squares: dict[str, Tensor]) -> None:
    """Put the mean squares of linears' inputs in the order that their columns have now."""
    for site in linear_sites(graph):
        entries = family.places.get((site.weight_name, 1))
        if entries is not None and site.name in squares:
            values = squares[site.name]
            squares[site.name] = values[moved(len(values), entries, order)]
