"""Steps that structured passes share: choose families of channels, remove some, record and plan what that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.sites import Site, linear_sites, match_sites
from compressor.numerics.range_search import Work
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.site_plan import CalibrationNeeds, SitePlan
from compressor.pipeline.sites import choose_sites, patterns

_NAMED = 3  # reasons that a message gives


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
        return f"{self.family.count - removed} of {self.family.count} channels are left"

    def columns(self, site: Site) -> Tensor:
        """Return the columns of each channel in a reader's weight, int64 [channels, columns of one]."""
        return torch.from_numpy(self.family.places[site.weight_name, 1])


def inner_channels(graph: GraphModule) -> tuple[Dependencies, list[Channels], list[str]]:
    """Find the channels that linears alone write and read, one reader's input each, and why others have to stay.

    Returns:
        The graph's dependencies, the channels in dataflow order, and a reason for each other family.
    """
    dependencies = Dependencies(graph)
    sites = linear_sites(graph)
    rows = {name: site for site in sites for name in (site.weight_name, site.bias_name) if name}
    columns = {site.weight_name: site for site in sites}
    found, reasons = [], []
    for family in dependencies.families():
        readers = [columns[name] for name, axis in family.places if axis == 1 and name in columns]
        writers = [rows[name] for name, axis in family.places if axis == 0 and name in rows]
        if not readers or not writers:
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
    if len(family.places) > len(readers) + len(writers):
        return "what is not a linear holds some of them"
    if len({site.input for site in readers}) > 1:
        return f"{readers[0].name} and {readers[1].name} read them in two places"
    if any(site.tied for site in (*readers, *writers)):
        return "the weight is shared with another part of the model"
    return ""


def choose_channels_of(
    graph: GraphModule, pass_name: str, targets: str | Sequence[str], ignore: str | Sequence[str]
) -> tuple[Dependencies, list[Channels]]:
    """Return the inner channels of which a linear matches ``targets`` and none matches ``ignore``.

    Raises:
        UsageError: a pattern matches nothing, or no channels are left; the reasons of some others are given.
    """
    sites = choose_sites(graph, pass_name, None, targets, ())
    matched = {site.name for site in sites}
    protected = {site.name for site in match_sites(linear_sites(graph), patterns(ignore))[0]}
    dependencies, found, reasons = inner_channels(graph)
    chosen = [one for one in found if matched & {*one.names} and not protected & {*one.names}]
    if not chosen:
        why = "; ".join(reasons[:_NAMED]) if not found else "those of others do not match, or are ignored"
        raise UsageError(f"{pass_name}: no channels of the matched linears can be removed{why and f': {why}'}")
    return dependencies, chosen


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
    needs: CalibrationNeeds,
    work: Callable[[int, int], Work],
    working_bytes: Callable[[int, int], int],
) -> list[SitePlan]:
    """Remove so many channels of a graph without weights, and return one plan per linear.

    Args:
        work, working_bytes: functions of a reader's (out_features, in_features) before the removal.
    """
    sites = {site.name: site for site in linear_sites(graph)}
    before = weight_bytes_of(graph)
    dependencies.remove([(channels.family, np.arange(count)) for channels, count in removed])
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
            plan = replace(plan, work=work(*size), working_bytes=working_bytes(*size), needs=needs)
        plans.append(plan)
    return plans
