"""Restore the segments of a pass that an earlier run has cached, and cache them as they are finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.formats.parts import PARTS
from compressor.graph.rewrite import replace_linear, replace_weight, set_parameter
from compressor.graph.sites import Site, weight_sites
from compressor.host.digests import digest
from compressor.host.tensor_files import trim
from compressor.pipeline.context import Context, SiteRecord
from compressor.progress import Task


class Blocks:
    """Cache of one pass's finished segments: asked before the linears of a segment are processed, told afterwards.

    Without a cache in the context nothing is restored and nothing kept.

    Args:
        ctx: context of the run; its ``state`` is the digest of the graph before the pass.
        step: the pass; all options except ``targets`` and ``ignore`` are part of the cache key.
        task: progress of the pass, in linears.
        decides: further plain data that determine the results, part of the key.
        chained: whether a segment's result depends on the segments before it, too.
    """

    def __init__(self, ctx: Context, name: str, step: Any, task: Task, *, decides: Any = None, chained: bool) -> None:
        self.ctx, self.name, self.task, self.chained = ctx, name, task, chained
        options = {k: v for k, v in dataclasses.asdict(step).items() if k not in step.choosing_options}
        self._base = digest(ctx.state, name, options, decides)
        self._key = ""

    def restore(self, graph: GraphModule, sites: Sequence[Site]) -> bool:
        """Replace the dense weights of a segment by cached packed ones, if there are any, and return whether there
        were.
        """
        self._key = digest(self._base, [site.name for site in sites])
        if self.chained:
            self._base = self._key
        self.ctx.blocks += 1
        found = self.ctx.results.load(self._key) if self.ctx.results is not None else None
        if found is None or [record["site"] for record in found.records] != [site.name for site in sites]:
            return False
        for site, fields in zip(sites, found.records, strict=True):
            if fields["format"]:
                fmt = Format.parse(fields["format"])
                shape = (site.out_features, site.in_features)
                parts = {part: found.tensors[f"{site.name}.{part}"] for part in fmt.parts(*shape)}
                replace_linear(graph, site, PackedWeight(parts, fmt, shape))
            else:
                replace_weight(graph, site, found.tensors[f"{site.name}.weight"])
            self.ctx.records.append(SiteRecord(**fields))
        self.ctx.reused += 1
        self.task.advance(len(sites))
        return True

    def keep(self, graph: GraphModule, sites: Sequence[Site]) -> None:
        """Store the packed weights of the segment of the last :meth:`restore` in the cache, and map them from there."""
        if self.ctx.results is None:
            return
        records = {record.site: dataclasses.asdict(record) for record in self.ctx.records}
        names = {f"{site.name}.{part}" for site in sites for part in PARTS}
        tensors = {name: value.detach() for name, value in graph.named_parameters() if name in names}
        dense = {site.name: site.weight_name for site in weight_sites(graph)}
        for site in sites:
            if not records[site.name]["format"]:
                tensors[f"{site.name}.weight"] = graph.get_parameter(dense[site.name]).detach()
        label = f"{graph.meta['model'].name}: {self.name}"
        stored = self.ctx.results.save(self._key, label, tensors, [records[site.name] for site in sites])
        for name, value in stored.tensors.items():
            of_dense = dense.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            set_parameter(graph, of_dense or name, value)
        del tensors
        trim()


def cached_tensors(
    graph: GraphModule, ctx: Context, name: str, decides: Any, make: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Return tensors that a pass computes from samples before its first segment, cached if the run has a cache.

    Args:
        graph: the graph as it was when the pass began, whose digest is ``ctx.state``.
        name: name of the tensors, part of the cache key.
        decides: plain data that determine the tensors beside the graph.
        make: computes the tensors.
    """
    if ctx.results is None:
        return make()
    key = digest(ctx.state, name, decides)
    label = f"{graph.meta['model'].name}: {name}"
    return (ctx.results.load(key) or ctx.results.save(key, label, make(), [])).tensors
