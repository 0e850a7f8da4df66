"""Choose how many channels of each family of a graph go under a budget, and which; any family that has readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian, MeanSquares
from compressor.errors import UsageError
from compressor.graph.dependencies.axes import shape_of
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.sites import Site, linear_sites, match_sites, weight_sites
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.column_removal import only_columns, refit_columns, removal_work, removal_working_bytes
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import change_site, choose_sites, error_context, patterns
from compressor.progress import Task
from compressor.search.widths import choose_widths, removed_of

Measure: TypeAlias = Literal["channels", "parameters", "macs", "weight_bytes"]
"""What a budget counts: channels, numbers in parameters, products of linears and convolutions, bytes of parameters."""
_EXPERT_ROWS = torch.ops.compressor.expert_rows.default
_NAMED = 3  # reasons that a message gives


@dataclass(frozen=True)
class Widths:
    """Families that may lose channels.

    Attributes:
        dependencies: of the graph.
        families: in the order of the parameters.
        readers: of each, the linears and convolutions whose columns its channels are.
    """

    dependencies: Dependencies
    families: list[Family]
    readers: list[list[Site]]

    def columns(self, family: int, site: Site) -> Tensor:
        """Return the columns of each channel in a reader's weight, int64 [channels, columns of one]."""
        return torch.from_numpy(self.families[family].places[site.weight_name, 1])

    def losses(self, saliency: Mapping[str, Tensor]) -> list[Tensor]:
        """Return each channel's mean square of what its readers' columns add up to, in units of its family's mean.

        Args:
            saliency: by site, what a sample's loss changes by without a column, to first order, float64 [samples, in].
        """
        found = []
        for number, readers in enumerate(self.readers):
            parts = [saliency[site.name][:, self.columns(number, site)].sum(2) for site in readers]
            score = torch.stack(parts).sum(0).square().mean(0)
            found.append(score / max(float(score.mean()), 1e-300))
        return found


def find_widths(
    graph: GraphModule, pass_name: str, targets: Sequence[str] | str, ignore: Sequence[str] | str
) -> Widths:
    """Find the families of which a linear or convolution matches ``targets`` and none matches ``ignore``.

    Raises:
        UsageError: a pattern matches nothing, or no family is left; the reasons of some others are given.
    """
    chosen = choose_sites(graph, pass_name, None, targets, (), weight_sites, "linear or convolution")
    sites = weight_sites(graph)
    matched = {site.weight_name for site in chosen}
    protected = {site.weight_name for site in match_sites(sites, patterns(ignore))[0]}
    tied = {site.weight_name for site in sites if site.tied}
    columns = {site.weight_name: site for site in linear_sites(graph)}
    found, reasons = Widths(Dependencies(graph), [], []), []
    for family in found.dependencies.families():
        names = {name for name, _ in family.places}
        readers = [columns[name] for name, axis in family.places if axis == 1 and name in columns]
        if not readers or family.count < 2 or len(family.places) < 2 or family.groups:
            continue
        reason = family.reason or ("a weight is shared with another part of the model" if names & tied else "")
        if reason:
            reasons.append(f"{readers[0].name}: {reason}")
        elif names & matched and not names & protected:
            found.families.append(family)
            found.readers.append(readers)
    if not found.families:
        raise UsageError(
            f"{pass_name}: no channels of the matched linears and convolutions can be removed"
            f"{': ' if reasons else ''}{'; '.join(reasons[:_NAMED])}"
        )
    return found


def cost_of(graph: GraphModule, widths: Widths, measure: Measure) -> Callable[[Sequence[int]], float]:
    """Return the function from channels that go, of each family, to what is left of a measure."""
    if measure == "channels":
        return lambda removed: float(sum(one.count - n for one, n in zip(widths.families, removed, strict=True)))
    lost: dict[tuple[str, int], list[tuple[int, int]]] = {}  # place -> families, and entries of one channel
    for number, family in enumerate(widths.families):
        for place, entries in family.places.items():
            lost.setdefault(place, []).append((number, entries.shape[1]))
    times: list[tuple[str, float]] = []
    if measure == "macs":
        times = list(_rows_read(weight_sites(graph)).items())
    else:
        times = [(n, p.element_size() if measure == "weight_bytes" else 1) for n, p in graph.named_parameters()]
    shapes = {name: list(graph.get_parameter(name).shape) for name, _ in times}

    def cost(removed: Sequence[int]) -> float:
        total = 0.0
        for name, factor in times:
            sizes = list(shapes[name])
            for axis in range(len(sizes)):
                sizes[axis] -= sum(removed[number] * each for number, each in lost.get((name, axis), ()))
            total += factor * math.prod(sizes)
        return total

    return cost


def _rows_read(sites: Sequence[Site]) -> dict[str, float]:
    """Return the rows that each weight multiplies, for the capture's inputs; of experts, as if all had equally many."""
    experts: dict[Any, set[Any]] = {}  # by the node that says which experts each token has
    for site in sites:
        if site.input.target is _EXPERT_ROWS:
            experts.setdefault(site.input.args[1], set()).add(site.input.args[2])
    found = {}
    for site in sites:
        index: Any = site.input.args[1] if site.input.target is _EXPERT_ROWS else None
        rows = shape_of(site.node)[:-1] if index is None else shape_of(index)
        found[site.weight_name] = math.prod(rows) / (1 if index is None else len(experts[index]))
    return found


def same_share(pass_name: str, widths: Widths, ratio: float, multiple: int) -> list[int]:
    """Return how many channels of each family go if each loses the same share.

    Raises:
        UsageError: a family would lose its last channel.
    """
    counts = []
    for family, readers in zip(widths.families, widths.readers, strict=True):
        wanted = round(ratio * family.count)
        if wanted >= family.count:
            raise UsageError(
                f"{pass_name}: {readers[0].name}: ratio {ratio:g} of {family.count} channels would take the last one; "
                "choose a smaller ratio, or ignore it"
            )
        counts.append(removed_of(family.count, wanted, multiple))
    return _some(pass_name, counts)


def choose_counts(
    pass_name: str,
    graph: GraphModule,
    widths: Widths,
    scores: Sequence[Tensor],
    measure: Measure,
    amount: float,
    multiple: int,
    least: float,
    is_global: bool,
) -> list[int]:
    """Return how many channels of each family go under a budget (:func:`compressor.search.widths.choose_widths`).

    Args:
        amount: bytes, or of another measure the share that may be left.
    Raises:
        UsageError: all that can go is not enough, or nothing would go.
    """
    cost = cost_of(graph, widths, measure)
    dense = cost([0] * len(scores))
    limit = amount if measure == "weight_bytes" else amount * dense
    counts = choose_widths(scores, cost, limit, multiple, least, is_global)
    if (reached := cost(counts)) > limit:
        raise UsageError(
            f"{pass_name}: {measure} of at most {limit:,.0f} ({limit / dense:.3g} of {dense:,.0f}) cannot be met: all "
            f"that `least`, `multiple` and the graph let go leaves {reached:,.0f}"
        )
    return _some(pass_name, counts)


def _some(pass_name: str, counts: list[int]) -> list[int]:
    if not any(counts):
        raise UsageError(f"{pass_name}: no channel would go: the budget is met as it is, or `multiple` is too large")
    return counts


def score_channels(graph: GraphModule, widths: Widths, squares: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Return each channel's share of what its readers read, in units of its family's mean, float64 [channels].

    Args:
        squares: means over each reader's inputs, float64 [in]; None to go by the weights alone.
    """
    scores = []
    for number, readers in enumerate(widths.readers):
        score = torch.zeros(widths.families[number].count, dtype=torch.float64)
        for site in readers:
            size = graph.get_parameter(site.weight_name).detach().double().square().sum(0)
            if squares is not None:
                size = size * squares[site.name]
            score += size[widths.columns(number, site)].sum(1) / max(float(size.sum()), 1e-300)
        scores.append(score / max(float(score.mean()), 1e-300))
    return scores


def squares_of(graph: GraphModule, ctx: Context, pass_name: str, widths: Widths) -> dict[str, Tensor]:
    """Run the samples, and return the mean squares of each reader's inputs, by site."""
    samples, names = ctx.calibration(pass_name), {site.name for sites in widths.readers for site in sites}
    sites = [site for site in linear_sites(graph) if site.name in names]
    run = CalibrationRun(
        graph, samples.ids, sites, MeanSquares, CalibrationOptions(true_sequential=False, spill=ctx.spill)
    )
    return {site.name: statistic.value for group, statistic in run.groups() for site in group}


def remove_widths(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    step: object,
    refit: bool,
    widths: Widths,
    chosen: Sequence[Tensor],
) -> GraphModule:
    """Remove channels, and refit what reads the others.

    Readers' columns are set to zero first, and go in the end, with all else that holds the channels: until then shapes
    stay, and what follows sees the outputs that the smaller model will have.

    Args:
        step: the pass, whose options are part of the cache's key.
        chosen: of each family, the channels that go, int64, rising.
    """
    before, begin, gone = _sizes(graph), len(ctx.records), _left_out(widths, chosen)
    if refit:
        with ctx.reporter.task(pass_name, len(gone)) as task:
            _refit_readers(graph, ctx, pass_name, step, gone, task)
    else:
        _zero_columns(graph, ctx, pass_name, gone)
    widths.dependencies.remove([(f, channels.numpy()) for f, channels in zip(widths.families, chosen, strict=True)])
    _record(graph, ctx, pass_name, begin, before)
    return graph


def _left_out(widths: Widths, chosen: Sequence[Tensor]) -> dict[str, list[int]]:
    """Return the columns that each reader loses, rising."""
    found: dict[str, list[int]] = {}
    for number, readers in enumerate(widths.readers):
        for site in readers if len(chosen[number]) else ():
            columns = widths.columns(number, site)[chosen[number]].flatten().tolist()
            found[site.name] = sorted({*found.get(site.name, ()), *columns})
    return found


def _zero_columns(graph: GraphModule, ctx: Context, pass_name: str, gone: Mapping[str, Sequence[int]]) -> None:
    """Set columns of linears and convolutions to zero, and record the share of each weight's squares that they are."""
    for site in [site for site in linear_sites(graph) if site.name in gone]:
        weight = graph.get_parameter(site.weight_name).detach()
        left = only_columns(weight, _others(site, gone))
        norm = float(weight.double().square().sum())
        error = float((weight - left).double().square().sum()) / norm if norm > 0 else 0.0
        change_site(graph, ctx, site, left, pass_name, error=error)


def _refit_readers(
    graph: GraphModule, ctx: Context, pass_name: str, step: object, gone: Mapping[str, Sequence[int]], task: Task
) -> None:
    """Set columns to zero and refit the others to the outputs that linears and convolutions had, one after another."""
    samples = ctx.calibration(pass_name)
    sites = [site for site in linear_sites(graph) if site.name in gone]
    decides = {"samples": samples.sha256, "columns": dict(gone)}
    store = Blocks(ctx, pass_name, step, task, decides=decides, chained=True)
    options = CalibrationOptions(store=store, spill=ctx.spill)
    for group, statistic in CalibrationRun(graph, samples.ids, sites, Hessian, options).groups():
        hessian = statistic.value
        for site in group:
            weight = graph.get_parameter(site.weight_name).detach()
            with error_context(site):
                refitted = refit_columns(weight.float(), hessian, _others(site, gone))
            error, norm = (float(quadratic(each.double(), hessian)) for each in (weight - refitted, weight))
            relative = error / norm if norm > 0 else 0.0
            change_site(graph, ctx, site, refitted.to(weight.dtype), pass_name, error=relative, error_of="output")
        task.advance(len(group))


def _others(site: Site, gone: Mapping[str, Sequence[int]]) -> Tensor:
    left = torch.ones(site.in_features, dtype=torch.bool)
    left[list(gone[site.name])] = False
    return left.nonzero()[:, 0]


Sizes: TypeAlias = "dict[str, tuple[int, int, int]]"
"""Linear or convolution -> rows, columns and bytes of its weight."""


def _sizes(graph: GraphModule) -> Sizes:
    """Return the sizes of all weights, in dataflow order."""
    weights = {site: graph.get_parameter(site.weight_name) for site in weight_sites(graph)}
    return {s.name: (s.out_features, s.in_features, w.numel() * w.element_size()) for s, w in weights.items()}


def _note(old: tuple[int, int, int], new: tuple[int, int, int]) -> str:
    return f"{new[0]} of {old[0]} rows and {new[1]} of {old[1]} columns are left"


def _record(graph: GraphModule, ctx: Context, pass_name: str, begin: int, before: Sizes) -> None:
    """Record what removing channels did to each weight; the records of readers have their errors already.

    Args:
        begin: number of records before the pass.
    """
    known = {record.site: record for record in ctx.records[begin:]}
    del ctx.records[begin:]
    for name, new in _sizes(graph).items():
        if new != (old := before[name]):
            record = known.get(name) or SiteRecord(name, pass_name, "", 0, 0, 0.0, "weight")
            notes = "; ".join(filter(None, [record.note, _note(old, new)]))
            ctx.records.append(replace(record, bytes_before=old[2], bytes_after=new[2], note=notes))


def plan_widths(graph: GraphModule, widths: Widths, chosen: Sequence[Tensor], refit: bool) -> list[SitePlan]:
    """Remove channels of a graph without weights, and return one plan for each linear and convolution."""
    before, gone = _sizes(graph), _left_out(widths, chosen)
    widths.dependencies.remove([(f, channels.numpy()) for f, channels in zip(widths.families, chosen, strict=True)])
    plans = []
    for name, new in _sizes(graph).items():
        old = before[name]
        note = _note(old, new) if new != old else "stays as it is"
        plan = SitePlan(name, new[0], new[1], "", old[2], new[2], note)
        if refit and name in gone:
            work, memory = removal_work(*old[:2], "activation"), removal_working_bytes(*old[:2])
            plan = replace(plan, work=dict(work), working_bytes=memory, needs=CalibrationNeeds(True, False))
        plans.append(plan)
    return plans
