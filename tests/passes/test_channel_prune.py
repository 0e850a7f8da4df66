"""The pass channel_prune on 14 kinds of graphs: counts are the plan's, budgets hold, and zeros go without a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_models import drop_weights
from pruned_models import IMAGES, PICTURES, TEXTS, captured, costs, free, output, samples_of
from torch import nn

from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.graph.dependencies.channels import Dependencies
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import held_tensor, set_tensor
from compressor.graph.sites import linear_sites, weight_sites
from compressor.passes.channel_prune import ChannelPrune
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.observers import VerifyStages
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.pipeline.structured.widths import find_widths
from compressor.search.widths import choose_widths
from compressor.training.saliency import column_saliency
from compressor.verify.bundle import verify_bundle


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ResNet", [8, 8, 16, 8]),  # the last beside zeros that the shortcut adds
        ("MobileNet", [8, 24]),
        ("U-Net", [8, 12, 6, 8]),
        ("beside itself", [10, 8]),
        ("in groups", [8]),
        ("ViT", [4, 40]),  # heads, which head_prune removes, and inner channels
        ("Mixtral", [2, 2, 64, 64]),  # of all experts at once
    ],
)
def test_families_are_found(name: str, counts: list[int]) -> None:
    assert [family.count for family in free(captured(name))] == counts


@pytest.mark.parametrize("ratio", [0.3, 0.5])
@pytest.mark.parametrize("name", [*TEXTS, *IMAGES])
def test_counts_are_the_plans(name: str, ratio: float) -> None:
    graph = captured(name)
    meta, before = clone_graph(graph), weight_bytes(graph)
    drop_weights(meta)
    refit = ratio == 0.5 and name in ("ResNet", "MobileNet", "U-Net")
    step = ChannelPrune(ratio, allocate="uniform", importance="magnitude", refit=refit)
    plans = {plan.site: plan for plan in step.plan(meta, Context())}
    ctx = Context(samples=samples_of(name))
    smaller = Pipeline([step], [VerifyStages()]).run(graph, ctx)
    assert weight_bytes(smaller) == weight_bytes(meta) < before
    assert {p.site for p in plans.values() if p.bytes_before != p.bytes_after} == {r.site for r in ctx.records}
    for record in ctx.records:
        assert (plans[record.site].bytes_after, plans[record.site].note) == (record.bytes_after, record.note)
    sizes = {s.name: (s.out_features, s.in_features) for s in weight_sites(smaller)}
    assert sizes == {plan.site: (plan.out_features, plan.in_features) for plan in plans.values()}
    with torch.no_grad():
        assert torch.isfinite(output(smaller, name)).all()


@pytest.mark.parametrize("name", [*TEXTS, *IMAGES])
def test_channels_that_are_zero_go_without_a_trace(name: str) -> None:
    """All that writes them is zero, bias included; ReLU, GELU, SiLU, products and sums of zeros are zero.

    Not so of heads: keys that are zero still get a share of the softmax, so their values have to be zero, as here.
    """
    graph, chosen = captured(name), []
    for family in free(graph):
        gone = np.arange(family.count // 2)
        chosen.append((family, gone))
        for (parameter, axis), entries in family.places.items():
            value = held_tensor(graph, parameter).detach().clone()
            if axis == 0:
                value[torch.from_numpy(entries[gone]).flatten()] = 0
            set_tensor(graph, parameter, value)
    smaller = clone_graph(graph)
    Dependencies(smaller).remove(chosen)
    assert weight_bytes(smaller) < weight_bytes(graph)
    with torch.no_grad():
        torch.testing.assert_close(output(smaller, name), output(graph, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ResNet", {"macs": 0.5}),
        ("MobileNet", {"parameters": 0.6, "allocate": "uniform"}),
        ("U-Net", {"weight_bytes": "6 KB", "refit": False}),
        ("Llama", {"parameters": 0.9, "multiple": 8}),
        ("Mixtral", {"macs": 0.85}),
    ],
)
def test_budgets_hold_and_are_used(name: str, options: dict[str, Any]) -> None:
    """What is left costs no more than the budget, and not much less: counted from the smaller graph itself."""
    graph, ctx = captured(name), Context(samples=samples_of(name))
    dense = costs(graph)
    smaller = Pipeline([ChannelPrune(**options)], [VerifyStages()]).run(graph, ctx)
    found = costs(smaller)
    for measure, limit in {**options, "weight_bytes": 6000}.items():
        if measure in options and measure in dense:
            share = found[measure] / (1 if measure == "weight_bytes" else dense[measure])
            assert 0.85 * limit < share <= limit
    if "multiple" in options:
        assert {s.in_features % 8 for s in linear_sites(smaller)} == {0}


def test_the_least_important_of_all_go_first() -> None:
    """By the plainest definition: one after another, as long as the cost is above the limit."""
    random = torch.Generator().manual_seed(1)
    scores = [torch.rand(size, generator=random) for size in (5, 9, 16)]

    def cost(removed: Sequence[int]) -> float:
        a, b, c = (len(each) - gone for each, gone in zip(scores, removed, strict=True))
        return a * b + b * c

    for limit in (150, 90, 30):
        removed = [0, 0, 0]
        for _, place in sorted((float(value), place) for place, each in enumerate(scores) for value in each):
            if cost(removed) <= limit:
                break
            if removed[place] < len(scores[place]) - 1:
                removed[place] += 1
        assert choose_widths(scores, cost, limit, 1, 0.0, True) == removed
    for uniform in (True, False):
        found = choose_widths(scores, cost, 90, 4, 0.3, uniform)
        assert all((len(each) - gone) % 4 == 0 or not gone for each, gone in zip(scores, found, strict=True))


def test_refitting_helps_and_activations_choose_better() -> None:
    errors = []
    for options in ({}, {"refit": False}):
        graph = Pipeline([ChannelPrune(0.4, **options)]).run(captured("U-Net"), Context(samples=samples_of("U-Net")))
        errors.append(float((output(graph, "U-Net") - output(captured("U-Net"), "U-Net")).square().mean()))
    assert errors[0] < errors[1]


def test_its_bundles_are_verified(write_module: Callable[..., Path], tmp_path: Path) -> None:
    graph, ctx = captured("MobileNet"), Context(samples=samples_of("MobileNet"))
    dense = weight_bytes(graph)
    graph = Pipeline([ChannelPrune(macs=0.6), Rtn("W8A16")], [VerifyStages()]).run(graph, ctx)
    bundle = write_module(graph, ctx, dense, tmp_path)
    assert all(check.passed for check in verify_bundle(bundle, threads=1).checks if check.name != "signature")


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        ctx = Context(samples=samples_of("ResNet"), results=SegmentCache(tmp_path), state="model")
        graph = ChannelPrune(0.4).run(captured("ResNet"), ctx)
        results.append((ctx, {name: value.detach() for name, value in graph.named_parameters()}))
    (first, made), (again, restored) = results
    assert (first.reused, again.reused) == (0, again.blocks) and again.records == first.records
    assert made.keys() == restored.keys() and all(torch.equal(made[name], restored[name]) for name in made)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ResNet", {}, "exactly one budget of ratio, parameters, macs, weight_bytes; found none"),
        ("ResNet", {"ratio": 0.5, "macs": 0.5}, "found ratio and macs"),
        ("ResNet", {"ratio": 0.0}, "ratio 0 is not between 0 and 1"),
        ("ResNet", {"macs": 1.0}, "macs 1 is not between 0 and 1"),
        ("ResNet", {"parameters": -2}, "not between"),
        ("ResNet", {"weight_bytes": "6 s"}, "write a number and a unit"),
        ("ResNet", {"ratio": 0.95, "least": 0.0}, "of 8 channels would take the last one"),
        ("ResNet", {"ratio": 0.95}, "least 0.1 is not between 0 and what the budget leaves"),
        ("ResNet", {"macs": 0.01}, "cannot be met: all that `least`, `multiple` and the graph let go leaves"),
        ("ResNet", {"ratio": 0.3, "multiple": 64}, "no channel would go"),
        ("ResNet", {"ratio": 0.3, "ignore": ["re:.*"]}, "no channels of the matched linears and convolutions"),
        ("Llama", {"ratio": 0.3, "targets": "q_proj"}, "takes the mean over it"),
        ("Llama", {"ratio": 0.3, "targets": "dwn_proj"}, "nearest .*down_proj"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ChannelPrune(**options).requires(captured(name), Context())


def test_taylor_is_the_slope_of_the_loss() -> None:
    """By the plainest definition: scale a channel of one family, in all that reads it, and difference the losses."""
    graph = captured("MobileNet")
    for name, parameter in graph.named_parameters():
        set_tensor(graph, name, parameter.detach().double())
    widths = find_widths(graph, "channel_prune", "re:.*", ())
    ctx = Context(samples=Samples(PICTURES[:3].double(), torch.zeros(0), "pictures", "random pictures"))
    sites = {site.name: site for readers in widths.readers for site in readers}
    scores = widths.losses(column_saliency("channel_prune", graph, ctx, list(sites.values())))
    predicted = graph(PICTURES[:3].double()).argmax(1)
    slopes = []
    for channel in (3, 17):
        losses = []
        for scale in (1 + 1e-4, 1 - 1e-4):
            scaled = clone_graph(graph)
            for site in widths.readers[1]:
                weight = graph.get_parameter(site.weight_name).detach().clone()
                weight[:, widths.columns(1, site)[channel]] *= scale
                set_tensor(scaled, site.weight_name, weight)
            losses.append(nn.functional.cross_entropy(scaled(PICTURES[:3].double()), predicted, reduction="none"))
        slopes.append(float(((losses[0] - losses[1]) / 2e-4).square().mean()))
    assert float(scores[1][3] / scores[1][17]) == pytest.approx(slopes[0] / slopes[1], rel=1e-3)


def test_taylor_chooses_and_says_what_it_cannot_rank() -> None:
    graph = Pipeline([ChannelPrune(0.3, importance="taylor", refit=False)], [VerifyStages()]).run(
        captured("Llama"), Context(samples=samples_of("Llama"))
    )
    assert weight_bytes(graph) < weight_bytes(captured("Llama"))
    with pytest.raises(UsageError, match="importance taylor needs gradients of a loss"):
        ChannelPrune(0.3, importance="taylor").requires(captured("BERT"), Context())
