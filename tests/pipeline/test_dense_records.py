"""Passes that pack nothing: a masked weight has a record, is checked, cached and resumed like a packed one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import VerificationError
from compressor.graph.sites import linear_sites
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.resume import Blocks
from compressor.pipeline.segment_cache import SegmentCache
from compressor.pipeline.sites import by_segment, change_site, choose_sites


@dataclasses.dataclass(frozen=True)
class Mask(Pass):
    """Set the smaller half of each row to zero."""

    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    lie: int = 0

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        sites = choose_sites(graph, "mask", None, self.targets, self.ignore)
        with ctx.reporter.task("mask", len(sites)) as task:
            blocks = Blocks(ctx, "mask", self, task, chained=False)
            for block in by_segment(graph, sites):
                if blocks.restore(graph, block):
                    continue
                for site in block:
                    weight = graph.get_parameter(site.weight_name).detach()
                    kept = weight.abs() >= weight.abs().median(dim=1, keepdim=True).values
                    change_site(graph, ctx, site, weight * kept, "mask", error=0.1)
                blocks.keep(graph, block)
        ctx.records[:] = [dataclasses.replace(r, bytes_after=r.bytes_after + self.lie) for r in ctx.records]
        return graph


def captured() -> GraphModule:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 7)).eval().requires_grad_(False)
    return capture(module, (torch.zeros(3, 40),))


def test_a_masked_weight_has_a_record_and_is_packed_later() -> None:
    graph, context = captured(), Context()
    graph = Pipeline([Mask()], [VerifyStages()]).run(graph, context)
    assert [(r.site, r.format, r.bytes_before == r.bytes_after) for r in context.records] == [
        ("0", "", True), ("2", "", True)
    ]  # fmt: skip
    for site in linear_sites(graph):
        weight = graph.get_parameter(site.weight_name)
        assert 0.4 < float((weight == 0).float().mean()) < 0.6
    graph = Pipeline([Rtn("W8A16")], [VerifyStages()]).run(graph, context)
    assert {r.site: r.format for r in context.records} == {"0": "W8A16", "2": "W8A16"}


def test_bytes_that_are_not_those_of_the_weight_are_refused() -> None:
    with pytest.raises(VerificationError, match="after mask: 0 is said to take 10244 bytes and takes 10240"):
        Pipeline([Mask(lie=4)], [VerifyStages()]).run(captured(), Context())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    graph, context = captured(), Context()
    site = linear_sites(graph)[0]
    change_site(graph, context, site, torch.full((64, 40), torch.nan), "mask", error=0.0)
    with pytest.raises(VerificationError, match=r"after mask: 0\.weight holds (nan|inf)"):
        VerifyStages()(1, "mask", graph, context)


def test_masked_weights_come_from_the_cache(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        context = Context(results=SegmentCache(tmp_path), state="model")
        graph = Pipeline([Mask()], [VerifyStages()]).run(captured(), context)
        results.append((context, {name: value.detach() for name, value in graph.named_parameters()}))
    (first, made), (again, restored) = results
    assert (first.reused, again.reused) == (0, again.blocks) and again.records == first.records
    assert made.keys() == restored.keys() and all(torch.equal(made[name], restored[name]) for name in made)
