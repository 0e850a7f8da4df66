"""The pass channel_prune on 14 kinds of graphs: counts are the plan's, budgets hold, and zeros go without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, ENCODERS, LENGTH, VOCAB, make
from packed_models import drop_weights, random_samples
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.graph.caches import empty_past
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

relu = nn.functional.relu


def conv(i: int, o: int, k: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, **options), nn.BatchNorm2d(o))


class OptionA(nn.Module):
    """Two stages of a ResNet whose shortcut cuts places and pads channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 8), conv(8, 8), conv(8, 8)
        self.third, self.fourth, self.head = conv(8, 16, stride=2), conv(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.stem(x))
        x = relu(x + self.second(relu(self.first(x))))
        shortcut = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        return self.head(relu(shortcut + self.fourth(relu(self.third(x)))).mean((2, 3)))


class Mobile(nn.Module):
    """Inverted residuals: wide, depthwise, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.deep = conv(3, 8), conv(8, 24, 1), conv(24, 24, groups=24)
        self.narrow, self.head = conv(24, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.stem(x))
        wide = nn.functional.relu6(self.wide(x))
        return self.head((x + self.narrow(nn.functional.relu6(self.deep(wide)))).mean((2, 3)))


class Unet(nn.Module):
    """Down, up, and side by side with what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = conv(3, 8), conv(8, 12, stride=2), conv(12, 6, 1)
        self.join, self.last = conv(14, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = relu(self.first(x))
        up = nn.functional.interpolate(self.up(relu(self.down(first))), scale_factor=2)
        return self.last(relu(self.join(torch.cat([first, up], dim=1))))


class Twice(nn.Module):
    """A tensor beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.join, self.head = conv(3, 10), conv(20, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.first(x))
        return self.head(relu(self.join(torch.cat([x, x], dim=1))).mean((2, 3)))


class Grouped(nn.Module):
    """A convolution in groups, which go whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped, self.last = conv(3, 16), conv(16, 24, groups=8), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(relu(self.grouped(relu(self.first(x)))))


class Vit(nn.Module):
    """A block of a ViT whose queries, keys and values are one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 24, 4, 4), nn.LayerNorm(24)
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.fc1, self.fc2, self.head = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return self.head((x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))).mean(1))


IMAGES: dict[str, type[nn.Module]] = {
    "ResNet": OptionA,
    "MobileNet": Mobile,
    "U-Net": Unet,
    "beside itself": Twice,
    "in groups": Grouped,
    "ViT": Vit,
}
SEVEN = {**DECODERS["Llama"][1], "hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 7, "head_dim": 8}
TEXTS = ["Llama", "Qwen 3", "Mistral", "GPT-2", "OPT", "BERT", "seven groups", "Mixtral"]
PICTURES = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 3, 16, 16))).float()


@functools.cache
def _captured(name: str) -> GraphModule:
    if name in IMAGES:
        torch.manual_seed(0)
        model = IMAGES[name]()
        for _ in range(3):
            model(PICTURES)  # so that batch norms have statistics
        return capture(model.eval(), PICTURES[:4])
    if name == "seven groups":
        return capture(make("Llama", SEVEN, True))
    return capture(make(*(DECODERS if name in DECODERS else ENCODERS)[name], name in DECODERS))


def captured(name: str) -> GraphModule:
    """Return a graph to change; its parameters stay as they are."""
    return clone_graph(_captured(name))


def samples_of(name: str) -> Samples:
    if name in IMAGES:
        return Samples(PICTURES, torch.zeros(0), "pictures", "random pictures")
    return random_samples(VOCAB, 32)


def output(graph: GraphModule, name: str) -> Tensor:
    if name in IMAGES:
        return graph(PICTURES[:4])  # type: ignore[no-any-return]
    info, ids = graph.meta["model"], torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    position = torch.arange(LENGTH)
    if info.kind == "encoder":
        found = graph(ids, torch.ones(2, LENGTH))
    else:
        found = graph(ids, position, position, *empty_past(info, 2))
    return found if isinstance(found, Tensor) else found[0]


def free(graph: GraphModule) -> list[Any]:
    columns = {(site.weight_name, 1) for site in linear_sites(graph)}
    return [
        family
        for family in Dependencies(graph).families()
        if not family.reason and family.count > 1 and len(family.places) > 1 and family.places.keys() & columns
    ]


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
    ],
)
def test_budgets_hold_and_are_used(name: str, options: dict[str, Any]) -> None:
    """What is left costs no more than the budget, and not much less: counted from the smaller graph itself."""
    graph, ctx = captured(name), Context(samples=samples_of(name))
    dense = costs(graph)
    smaller = Pipeline([ChannelPrune(**options)], [VerifyStages()]).run(graph, ctx)
    found = costs(smaller)
    for measure, limit in (("macs", 0.5), ("parameters", options.get("parameters", 0)), ("weight_bytes", 6000)):
        if measure in options:
            share = found[measure] / (1 if measure == "weight_bytes" else dense[measure])
            assert 0.85 * limit < share <= limit
    if "multiple" in options:
        assert {s.in_features % 8 for s in linear_sites(smaller)} == {0}


def costs(graph: GraphModule) -> dict[str, float]:
    macs = 0.0
    for site in weight_sites(graph):
        shape = [size if isinstance(size, int) else size.node.hint for size in site.node.meta["val"].shape]
        macs += float(np.prod(shape[:-1])) * site.out_features * site.in_features
    return {"macs": macs, "parameters": sum(p.numel() for p in graph.parameters()), "weight_bytes": weight_bytes(graph)}


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
