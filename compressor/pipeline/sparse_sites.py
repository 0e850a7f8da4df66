"""Steps of passes that leave out blocks: check the format, prune on samples, compare at equal bytes, plan."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.calibration.statistics import Inputs as Channels
from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks, KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.obs import match_dense
from compressor.numerics.products.bfloat16 import is_coarse
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.range_search import Work
from compressor.numerics.sparsity.block_sparsity import (
    COLUMNS,
    dampened_factor,
    left_blocks,
    only_kept,
    outliers,
    round_columns,
    round_kept,
)
from compressor.numerics.sparsity.n_of_m import Pattern, left_entries, only_kept_entries, pattern_of, round_entries
from compressor.numerics.sparsity.pruning_costs import pruning_bytes, pruning_work, smaller_dense
from compressor.pipeline.calibrated_sites import Quantized, enough_dampening, quantize_calibrated
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.resume import Blocks, cached_tensors
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan, plan_sites, plan_zeros
from compressor.pipeline.sites import by_segment, choose_sites, error_context, summarise_formats
from compressor.search.knapsack import require_solver
from compressor.search.sparsity import by_budget, by_outliers, check_schemes, stored_bytes

Allocation: TypeAlias = Literal["uniform", "owl", "budget"]
"""How much is left out of each linear: the same of all, less where there are outliers, or what an integer programme
finds."""

_BETTER = "the error would be smaller in"
_DENSE = "weights become zero; it stays dense"


@dataclass(frozen=True)
class Inputs:
    """Moments of a linear's inputs.

    Attributes:
        hessian: float32 [in, in].
        factor: of its inverse, float64 [in, in] (:func:`compressor.numerics.sparsity.block_sparsity.dampened_factor`).
        dampening_frac: fraction of the mean diagonal that was added for that.
    """

    hessian: Tensor
    factor: Tensor
    dampening_frac: float


class BlockPruning(Pass):
    """What passes have in common that leave out blocks: all but the choice.  The options are those of each pass.

    Attributes:
        scheme: name of a format that leaves out blocks.
        targets, ignore: patterns of linears.
        refit: whether what is kept is refitted to the outputs of the whole weight before it is rounded.
        dampening_frac: fraction of the Hessian's mean diagonal added to the diagonal.
        pack: whether the weights are stored in the format; otherwise they stay dense, with zeros.
        allocate: how much is left out of each linear.
        owl_lambda, owl_factor: of ``owl``: most that shares differ by, halved; size of an outlier, in means.
        schemes: of ``budget``: names of formats to choose from.
        widths: columns of the blocks that the pass leaves out.
        other: what leaves out blocks of another width, for messages.
    """

    widths: ClassVar[tuple[Literal[1, 4, 64], ...]] = (1, 64)
    other: ClassVar[str] = "group_sparse leaves out blocks of 32x4"
    scheme: str
    targets: str | tuple[str, ...]
    ignore: str | tuple[str, ...]
    refit: bool
    dampening_frac: float
    pack: bool
    allocate: Allocation
    owl_lambda: float
    owl_factor: float
    schemes: tuple[str, ...]

    @abstractmethod
    def choose_blocks(self, weight: Tensor, inputs: Inputs, count: int, blocks: ColumnBlocks) -> Tensor:
        """Return the columns that each tile keeps, rising: int64 [tiles, count].

        Args:
            weight: float32 [out, in].
            inputs: of the linear, as the samples have them.
            count: columns to keep.
            blocks: of which shape.
        """

    def choose_entries(self, weight: Tensor, inputs: Inputs, pattern: Pattern) -> Tensor:
        """Return which single weights are kept: bool [out, in].

        Args:
            weight, inputs: as of :meth:`choose_blocks`.
        """
        raise UsageError(f"{self._name} leaves out blocks only; {self.scheme} has another pattern")

    def choosing_work(self, rows: int, columns: int, kept: int) -> Work:
        """Return the work of :meth:`choose_blocks`, beyond what all of these passes do."""
        return {}

    def __post_init__(self) -> None:
        fmt, wanted = Format.parse(self.scheme), ColumnBlocks(50, self.widths[0])
        is_pattern = pattern_of(fmt) is not None
        if fmt.extra(ColumnBlocks) is None and not (is_pattern and 1 in self.widths):
            raise UsageError(
                f"{self._name}: scheme {self.scheme} leaves {'no blocks' if is_pattern else 'nothing'} out; say how "
                f"much at its end, such as {fmt.of_kept.name}{wanted.suffix}: half of the blocks of {wanted.shape}"
                + (f", {fmt.name}_2:4 or {fmt.name}_B1x1@50" if 1 in self.widths else "")
            )
        if self.allocate == "owl" and fmt.extra(KeptOfGroup) is not None:
            raise UsageError(f"{self._name}: owl moves shares (_B16x1@50, _B1x1@50), and {self.scheme} has a fixed one")
        if not 0 <= self.dampening_frac <= 1:
            raise UsageError(f"{self._name}: dampening_frac {self.dampening_frac} is not between 0 and 1")
        if not 0 < self.owl_lambda <= 0.5 or not self.owl_factor > 0:
            raise UsageError(
                f"{self._name}: owl_lambda {self.owl_lambda}, owl_factor {self.owl_factor}: give a share above 0, at "
                "most 0.5, and a number above 0"
            )
        if self.schemes and self.allocate != "budget":
            raise UsageError(f"{self._name}: schemes are what `allocate: budget` chooses from; this is {self.allocate}")
        if self.allocate != "uniform" and not self.pack:
            raise UsageError(
                f"{self._name}: allocate {self.allocate} packs each linear in a format of its own, and no later pass "
                "would know it: take `pack: true`, or `allocate: uniform`"
            )
        for each in check_schemes(self._name, self.scheme, self.schemes):
            blocks = each.extra(ColumnBlocks)
            if (blocks.width if blocks is not None else 1) not in self.widths:
                takes = " and ".join(f"_B{ColumnBlocks(50, width).shape}@..." for width in self.widths)
                raise UsageError(f"{self._name}: scheme {each.name}: takes {takes}; {self.other}")

    @property
    def runs_samples(self) -> bool:
        """True if what is left out of each linear is measured first."""
        return self.allocate != "uniform"

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a budget where the solver of integer programmes is not installed."""
        if self.allocate == "budget":
            require_solver()

    @property
    def _name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Replace every matched linear, and say where fewer bits would do better.

        The records' errors are those of the sites' outputs over the samples.
        """
        formats, samples, begin = self._formats(graph), ctx.calibration(self._name), len(ctx.records)
        if self.allocate != "uniform":
            formats = self._allocated(graph, ctx, formats)
        plain = {site: fmt.name for site, fmt in formats.items()}
        with ctx.reporter.task(self._name, len(formats)) as task:
            blocks = Blocks(ctx, self._name, self, task, decides=[samples.sha256, plain], chained=True)
            quantize_calibrated(graph, ctx, self._name, formats, blocks, self.quantize)
        worse = sum(_BETTER in (record.note or "") for record in ctx.records[begin:])
        if worse:
            ctx.notes.append(
                f"{self._name}: {worse} of {len(formats)} linears would have smaller errors in a dense format of no "
                "more bytes (see the notes of the linears); at this sparsity fewer bits pay more than zeros"
            )
        graph.recompile()
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Predict what :meth:`run` will do, on a graph without weights."""
        needs, formats = CalibrationNeeds(True, True), self._formats(graph)
        if self.allocate != "uniform":
            ctx.notes.append(
                f"{self._name}: allocate {self.allocate}: what is left out of each linear follows from what the run "
                f"measures; planned as {self.scheme} for all, and together they take no more bytes than that"
            )
        if self.pack:
            return plan_sites(graph, formats, self.ignore, self._work, pruning_bytes, needs)
        plans = plan_zeros(graph, formats)
        for number, plan in enumerate(plans):
            if (fmt := formats.get(plan.site)) is not None:
                shape = (plan.out_features, plan.in_features)
                work, working_bytes = dict(self._work(*shape, fmt)), pruning_bytes(*shape, fmt)
                plans[number] = replace(plan, note=_DENSE, work=work, working_bytes=working_bytes, needs=needs)
        return plans

    def _formats(self, graph: GraphModule) -> dict[str, Format]:
        """Return the formats of the linears that are pruned."""
        fmt = Format.parse(self.scheme)
        found = choose_sites(graph, self._name, fmt.of_kept, self.targets, self.ignore)
        for site in found:
            with error_context(site):
                for each in check_schemes(self._name, self.scheme, self.schemes):
                    each.stored_columns(site.in_features)  # raises where groups do not fill a row
                    blocks = each.extra(ColumnBlocks)
                    if blocks is not None and site.in_features % blocks.width:
                        raise UsageError(
                            f"{self._name}: {each.name}: rows of {site.in_features} weights are not whole blocks of "
                            f"{blocks.width} columns; `ignore` leaves this linear"
                        )
        return {site.name: fmt for site in found}

    def _allocated(self, graph: GraphModule, ctx: Context, formats: Mapping[str, Format]) -> dict[str, Format]:
        """Return a format of its own for each linear, all together in no more bytes; a note compares them."""
        sites = [site for site in linear_sites(graph) if site.name in formats]
        candidates = check_schemes(self._name, self.scheme, self.schemes)
        samples, is_owl = ctx.calibration(self._name), self.allocate == "owl"
        options = {name: getattr(self, name) for name in ("refit", "dampening_frac", "owl_factor")}
        decides = [samples.sha256, [s.name for s in sites], [fmt.name for fmt in candidates], self._name, options]
        measure = partial(self._outliers, graph, ctx, sites)
        if not is_owl:
            measure = partial(self._errors, graph, ctx, sites, candidates)
        measured = cached_tensors(graph, ctx, f"allocate {self.allocate}", decides, measure)
        text = f"{self._name}: allocate {self.allocate}: "
        if is_owl:
            counts = {name: float(count) for name, count in measured.items()}
            chosen = by_outliers(by_segment(graph, sites), counts, candidates[0], self.owl_lambda)
            weights = sum(site.out_features * site.in_features for site in sites)
            text += f"{sum(counts.values()) / weights:.2%} of the weights are outliers"
        else:
            errors = {name: values.tolist() for name, values in measured.items()}
            chosen = by_budget(sites, candidates, errors)
            ours = sum(errors[name][candidates.index(fmt)] for name, fmt in chosen.items())
            uniform = sum(each[0] for each in errors.values())
            text += f"errors of all outputs add up to {ours:.4g}, with {self.scheme} to {uniform:.4g}"
        stored, most = (stored_bytes(sites, each) for each in (chosen, formats))
        ctx.notes.append(f"{text}; {stored:,} bytes, where {self.scheme} takes {most:,}")
        ctx.notes.append(summarise_formats(self._name, sites, chosen))
        return chosen

    def _outliers(self, graph: GraphModule, ctx: Context, sites: list[Site]) -> dict[str, Tensor]:
        """Return how many of each site's weights are outliers: int64 [1]."""
        found, options = {}, CalibrationOptions(true_sequential=False, spill=ctx.spill)
        run = CalibrationRun(graph, ctx.calibration(self._name).ids, sites, Channels, options)
        for group, statistic in run.groups():
            for site in group:
                weight = graph.get_parameter(site.weight_name).detach()
                found[site.name] = torch.tensor([outliers(weight, statistic.mean_square, self.owl_factor)])
        return found

    def _errors(
        self, graph: GraphModule, ctx: Context, sites: list[Site], candidates: list[Format]
    ) -> dict[str, Tensor]:
        """Return each site's error in each format on the dense model's inputs: float64 [formats], to four digits.

        Further digits depend on the number of threads.
        """
        found, options = {}, CalibrationOptions(true_sequential=False, spill=ctx.spill)
        with ctx.reporter.task("sparsities", len(sites)) as task:
            run = CalibrationRun(graph, ctx.calibration(self._name).ids, sites, Hessian, options)
            for group, statistic in run.groups():
                for site in group:
                    weight = graph.get_parameter(site.weight_name).detach().float()
                    with error_context(site):
                        least, _ = enough_dampening(statistic.tokens, weight.shape[1], self.dampening_frac)
                        inputs = Inputs(statistic.value, *dampened_factor(statistic.value, least))
                        errors = [self._pruned(weight, inputs, fmt)[1] for fmt in candidates]
                    found[site.name] = torch.tensor([float(f"{error:.4g}") for error in errors], dtype=torch.float64)
                    task.advance()
        return found

    def _work(self, rows: int, columns: int, fmt: Format) -> Work:
        work = self._work_of(rows, columns, fmt)
        if self.allocate == "budget":
            for other in check_schemes(self._name, self.scheme, self.schemes):
                work += self._work_of(rows, columns, other)
        return work

    def _work_of(self, rows: int, columns: int, fmt: Format) -> Counter[str]:
        return Counter(pruning_work(rows, columns, fmt)) + Counter(
            self.choosing_work(rows, columns, fmt.stored_columns(columns))
        )

    def quantize(self, weight: Tensor, statistic: Hessian, fmt: Format) -> Quantized:
        """Return a weight as it is stored in a format, by the statistics of its inputs."""
        hessian, cross, columns = statistic.value, statistic.cross, weight.shape[1]
        least, notes = enough_dampening(statistic.tokens, columns, self.dampening_frac)
        pattern, blocks = pattern_of(fmt), fmt.extra(ColumnBlocks) or COLUMNS
        left = left_entries(weight, pattern) if pattern else left_blocks(weight, fmt.stored_columns(columns), blocks)
        if cross is not None:
            weight = match_dense(weight, hessian, cross, rounded=is_coarse([fmt.of_kept]))
        inputs = Inputs(hessian, *dampened_factor(hessian, least))
        stored, error, damp = self._pruned(weight, inputs, fmt, left)
        if damp > least:
            notes.append(f"dampening raised to {damp:g}: the Hessian is not positive definite with {least:g}")
        if dead := int((torch.diagonal(hessian) <= 0).sum()):
            notes.append(f"{dead} inputs are zero in all samples")
        dense = smaller_dense(fmt, *weight.shape) if self.pack else None
        if dense is not None:
            rounded = round_columns(weight.double(), hessian.double(), inputs.factor, dense)
            if _relative_loss(weight, dequantize(rounded), hessian) < error:
                notes.append(f"{_BETTER} {dense.name}, which takes no more bytes")
        return Quantized(stored, error, None, notes)

    def _pruned(
        self, weight: Tensor, inputs: Inputs, fmt: Format, kept: Tensor | None = None
    ) -> tuple[PackedWeight | Tensor, float, float]:
        """Return the weight as it is stored, its error, and the most that a tile was dampened by.

        Args:
            kept: columns that each tile keeps, or weights of each row; None chooses them.
        """
        H, damp = inputs.hessian, inputs.dampening_frac
        stored: PackedWeight | Tensor
        if (pattern := pattern_of(fmt)) is not None:
            kept = self.choose_entries(weight, inputs, pattern) if kept is None else kept
            if self.pack:
                stored = round_entries(weight, H, inputs.factor, kept, fmt, refit=self.refit)
            else:
                factor = inputs.factor
                stored = only_kept_entries(weight.double(), factor, H.double(), kept, refit=self.refit).float()
        else:
            blocks, count = fmt.extra(ColumnBlocks) or COLUMNS, fmt.stored_columns(weight.shape[1])
            kept = self.choose_blocks(weight, inputs, count, blocks) if kept is None else kept
            if self.pack:
                stored, damp = round_kept(weight, H, kept, fmt, damp, refit=self.refit)
            else:
                stored, damp = only_kept(weight, H, kept, damp, refit=self.refit)
        values = dequantize(stored) if isinstance(stored, PackedWeight) else stored
        return stored, _relative_loss(weight, values, H), damp


def _relative_loss(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    """Return the relative squared error of the outputs."""
    norm = float(quadratic(weight.double(), hessian)) or 1.0
    return float(quadratic(weight.double() - values, hessian)) / norm
