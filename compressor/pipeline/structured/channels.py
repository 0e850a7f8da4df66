"""Steps that structured passes share: choose families of channels, remove some, record and plan what that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.sites import Site, linear_sites, match_sites
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.column_removal import (
    Importance,
    choose_channels,
    only_columns,
    refit_columns,
    removal_work,
    removal_working_bytes,
)
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.resume import Blocks
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import change_site, choose_sites, error_context, patterns

_NAMED = 3  # reasons that a message gives

What: TypeAlias = Literal["channels", "groups", "query_heads"]
"""What goes: channels that are not heads, heads of keys with all query heads that read them, or query heads alone."""


class Removing(Protocol):
    """Options of a pass that removes channels between linears."""

    @property
    def importance(self) -> Importance:
        """How a channel's loss is estimated."""

    @property
    def refit(self) -> bool:
        """Whether the columns that stay make up for the others."""


@dataclass(frozen=True)
class Channels:
    """Channels between linears: rows of those that write them, columns of those that read them.

    Attributes:
        family: where they lie.
        writers, readers: names of the linears, in dataflow order; all readers have the same input.
    """

    family: Family
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of their linears."""
        return (*self.writers, *self.readers)

    def note(self, removed: int) -> str:
        """Say how many are left once so many are gone."""
        what = "heads" if self.family.groups else "channels"
        return f"{self.family.count - removed} of {self.family.count} {what} are left"

    @property
    def groups(self) -> int:
        """Runs of channels that have to lose as many as one another."""
        return self.family.groups or 1

    def first_channels(self, count: int) -> NDArray[np.int64]:
        """Return the first ``count`` channels, as many from each run."""
        return self.first(np.arange(self.family.count), count)

    def first(self, candidates: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the first ``count`` of some channels, as many from each run."""
        run = candidates // (self.family.count // self.groups)
        return np.concatenate([candidates[run == each][: count // self.groups] for each in range(self.groups)])

    def columns(self, site: Site) -> Tensor:
        """Return the columns of each channel in a reader's weight, int64 [channels, columns of one]."""
        return torch.from_numpy(self.family.places[site.weight_name, 1])


def inner_channels(graph: GraphModule, what: What) -> tuple[Dependencies, list[Channels], list[str]]:
    """Find the channels that linears alone write and read, one reader's input each, and why others have to stay.

    Heads may have more than linears: slopes, sinks and caches.

    Returns:
        The graph's dependencies, the channels in dataflow order, and a reason for each other family.
    """
    dependencies = Dependencies(graph, what == "query_heads")
    sites = linear_sites(graph)
    rows = {name: site for site in sites for name in (site.weight_name, site.bias_name) if name}
    columns = {site.weight_name: site for site in sites}
    found, reasons = [], []
    for family in dependencies.families():
        readers = [columns[name] for name, axis in family.places if axis == 1 and name in columns]
        writers = [rows[name] for name, axis in family.places if axis == 0 and name in rows]
        if not readers or not writers or bool(family.groups) != (what != "channels"):
            continue
        reason = family.reason or _why_not(family, readers, writers)
        if reason:
            reasons.append(f"{readers[0].name}: {reason}")
        else:
            found.append(Channels(family, _names(writers, sites), _names(readers, sites)))
    place = {site.name: number for number, site in enumerate(sites)}
    return dependencies, sorted(found, key=lambda one: place[one.readers[0]]), reasons


def _names(wanted: Sequence[Site], sites: Sequence[Site]) -> tuple[str, ...]:
    nodes = {site.node for site in wanted}
    return tuple(site.name for site in sites if site.node in nodes)


def _why_not(family: Family, readers: Sequence[Site], writers: Sequence[Site]) -> str:
    if not family.groups and len(family.places) > len(readers) + len(writers):
        return "what is not a linear holds some of them"
    if len({site.input for site in readers}) > 1:
        return f"{readers[0].name} and {readers[1].name} read them in two places"
    if any(site.tied for site in (*readers, *writers)):
        return "the weight is shared with another part of the model"
    return ""


def choose_channels_of(
    graph: GraphModule,
    pass_name: str,
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
    what: What = "channels",
) -> tuple[Dependencies, list[Channels]]:
    """Return the inner channels of which a linear matches ``targets`` and none matches ``ignore``.

    Raises:
        UsageError: a pattern matches nothing, or no channels are left; the reasons of some others are given.
    """
    sites = choose_sites(graph, pass_name, None, targets, ())
    matched = {site.name for site in sites}
    protected = {site.name for site in match_sites(linear_sites(graph), patterns(ignore))[0]}
    dependencies, found, reasons = inner_channels(graph, what)
    chosen = [one for one in found if matched & {*one.names} and not protected & {*one.names}]
    if not chosen:
        why = "; ".join(reasons[:_NAMED]) if not found else "those of others do not match, or are ignored"
        kind = "channels" if what == "channels" else "heads"
        raise UsageError(f"{pass_name}: no {kind} of the matched linears can be removed{why and f': {why}'}")
    return dependencies, chosen


def remove_inner(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    step: Removing,
    dependencies: Dependencies,
    removed: Sequence[tuple[Channels, int]],
) -> GraphModule:
    """Remove so many channels, chosen on calibration samples, and refit what reads the others if the pass says so.

    Readers' columns are set to zero first, and go in the end, with the rows that make them: until then shapes stay, and
    what follows sees the outputs that the smaller model will have.  Each reader's record has the relative squared error
    of its outputs.

    Args:
        step: the pass, whose options are part of the cache's key.
    """
    samples, before, begin = ctx.calibration(pass_name), weight_bytes_of(graph), len(ctx.records)
    of_reader: dict[str, list[tuple[Channels, int]]] = {}
    for entry in removed:
        for name in entry[0].readers:
            of_reader.setdefault(name, []).append(entry)
    sites = [site for site in linear_sites(graph) if site.name in of_reader]
    with ctx.reporter.task(pass_name, len(sites)) as task:
        store = Blocks(ctx, pass_name, step, task, decides=samples.sha256, chained=True)
        options = CalibrationOptions(store=store, spill=ctx.spill)
        for group, statistic in CalibrationRun(graph, samples.ids, sites, Hessian, options).groups():
            _leave_out(graph, ctx, pass_name, step, group, of_reader[group[0].name], statistic.value)
            task.advance(len(group))
    dependencies.remove([(one.family, one.first(_unread(graph, one), count)) for one, count in removed])
    record_removal(graph, ctx, pass_name, begin, removed, before)
    return graph


def _leave_out(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    step: Removing,
    group: Sequence[Site],
    entries: Sequence[tuple[Channels, int]],
    hessian: Tensor,
) -> None:
    """Set the columns of so many channels to zero, in what reads them, and refit the others.

    Args:
        entries: families whose channels lie side by side in the columns; other columns stay.
    """
    weights = [graph.get_parameter(site.weight_name).detach().float() for site in group]
    stays = torch.ones(group[0].in_features, dtype=torch.bool)
    with error_context(group[0]):
        for channels, count in entries:
            columns, left = channels.columns(group[0]), channels.family.count - count
            kept = choose_channels(torch.cat(weights), hessian, columns, left, step.importance, channels.groups)
            stays[columns] = False
            stays[columns[kept]] = True
        kept_columns = stays.nonzero()[:, 0]
        for site, weight in zip(group, weights, strict=True):
            refitted = only_columns(weight, kept_columns)
            if step.refit:
                refitted = refit_columns(weight, hessian, kept_columns)
            error, norm = (float(quadratic(each.double(), hessian)) for each in (weight - refitted, weight))
            stored, relative = refitted.to(graph.get_parameter(site.weight_name).dtype), error / norm if norm > 0 else 0
            change_site(graph, ctx, site, stored, pass_name, error=relative, error_of="output")


def _unread(graph: GraphModule, channels: Channels) -> NDArray[np.int64]:
    """Return the channels that no reader reads any more."""
    sites = {site.name: site for site in linear_sites(graph)}
    read = torch.zeros(channels.family.count, dtype=torch.bool)
    for name in channels.readers:
        weight = graph.get_parameter(sites[name].weight_name)
        read |= (weight != 0).any(0)[channels.columns(sites[name])].any(1)
    return (~read).nonzero()[:, 0].numpy()


def record_removal(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    begin: int,
    removed: Sequence[tuple[Channels, int]],
    before: Mapping[str, int],
) -> None:
    """Record what removing channels did to each linear; the records of readers have their errors already.

    Args:
        begin: number of records before the pass: an earlier one of the same name has its own.
        removed: channels, and how many of them went.
        before: bytes of each linear's weight before.
    """
    after, known = weight_bytes_of(graph), {record.site: record for record in ctx.records[begin:]}
    del ctx.records[begin:]
    for channels, count in removed:
        for name in channels.names:
            record = known.get(name) or SiteRecord(name, pass_name, "", 0, 0, 0.0, "weight")
            notes = "; ".join(filter(None, [record.note, channels.note(count)]))
            ctx.records.append(replace(record, bytes_before=before[name], bytes_after=after[name], note=notes))


def weight_bytes_of(graph: GraphModule) -> dict[str, int]:
    """Return the bytes of each dense linear's weight, by site."""
    weights = {site.name: graph.get_parameter(site.weight_name) for site in linear_sites(graph)}
    return {name: weight.numel() * weight.element_size() for name, weight in weights.items()}


def plan_removal(
    graph: GraphModule,
    dependencies: Dependencies,
    removed: Sequence[tuple[Channels, int]],
    importance: Importance,
) -> list[SitePlan]:
    """Remove so many channels of a graph without weights, and return one plan per linear."""
    sites = {site.name: site for site in linear_sites(graph)}
    before = weight_bytes_of(graph)
    dependencies.remove([(channels.family, channels.first_channels(count)) for channels, count in removed])
    after = weight_bytes_of(graph)
    notes = {name: (channels, count) for channels, count in removed for name in channels.names}
    plans = []
    for new in linear_sites(graph):
        old, shape = sites[new.name], (new.out_features, new.in_features)
        if new.name not in notes:
            plans.append(SitePlan(new.name, *shape, "", before[new.name], after[new.name], "stays as it is"))
            continue
        channels, count = notes[new.name]
        plan = SitePlan(new.name, *shape, "", before[new.name], after[new.name], channels.note(count))
        if new.name in channels.readers:
            size = (old.out_features, old.in_features)
            work, memory = dict(removal_work(*size, importance)), removal_working_bytes(*size)
            plan = replace(plan, work=work, working_bytes=memory, needs=CalibrationNeeds(True, False))
        plans.append(plan)
    return plans
