"""Formats under each kind of budget against trying all choices on small models."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import meta_packed
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import Site, linear_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.search.formats import BUDGETS, Budget, choose_formats, linear_seconds, only_budget

FORMATS = [Format.parse(name) for name in ("W2A16_G16", "W4A8_G16", "W8A16")]
PRICES = {"read_byte": 1e-9, "matmul_flop": 2e-10, "int8_op": 5e-11}
COSTS = [[0.9, 0.2, 0.01], [0.4, 0.3, 0.02], [0.5, 0.05, 0.04], [3.0, 0.1, 0.0]]


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    """With tied embeddings, so that to pack the head frees nothing, and one linear that is packed already."""
    sizes = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    found = capture(transformers.LlamaForCausalLM(config).eval())
    site = next(site for site in linear_sites(found) if site.name.endswith("o_proj"))
    replace_linear(found, site, rtn_quantize(found.get_parameter(site.weight_name), FORMATS[1]))
    return found


def four(graph: GraphModule) -> list[Site]:
    return [site for site in linear_sites(graph) if site.name.endswith(("q_proj", "up_proj", "down_proj", "lm_head"))]


@functools.cache
def stored(graph: GraphModule, picks: tuple[int, ...]) -> int:
    """Bytes of the model with these formats, by packing it."""
    packed = clone_graph(graph)
    for site, index in zip(four(packed), picks, strict=True):
        replace_linear(packed, site, meta_packed(site.out_features, site.in_features, FORMATS[index]))
    return weight_bytes(packed)


def milliseconds(graph: GraphModule, sites: list[Site], picks: tuple[int, ...]) -> float:
    """Of one token, by hand."""
    names = {site.name: FORMATS[index] for site, index in zip(sites, picks, strict=True)}
    o_proj = FORMATS[1].packed_bytes(48, 48)
    total = max(o_proj * 1e-9, 2 * 48 * 48 * 5e-11)
    for site in linear_sites(graph):
        weights, fmt = site.out_features * site.in_features, names.get(site.name)
        size = fmt.packed_bytes(site.out_features, site.in_features) if fmt else 4 * weights
        total += max(size * 1e-9, 2 * weights * (5e-11 if fmt is FORMATS[1] else 2e-10))
    return 1e3 * total


EVERY = list(itertools.product(range(3), repeat=4))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.62, 1.0])
@pytest.mark.parametrize("kind", ["bits", "weight_bytes", "latency_ms"])
def test_the_costs_are_the_least_that_the_budget_allows(graph: GraphModule, kind: str, fraction: float) -> None:
    sites = four(graph)
    weights = sum(site.out_features * site.in_features for site in sites)

    def size(picks: tuple[int, ...]) -> float:
        if kind == "latency_ms":
            return milliseconds(graph, sites, picks)
        if kind == "weight_bytes":
            return stored(graph, picks)
        shapes = [(site.out_features, site.in_features) for site in sites]
        return 8 / weights * sum(FORMATS[i].packed_bytes(*s) for i, s in zip(picks, shapes, strict=True))

    sizes = {picks: size(picks) for picks in EVERY}
    least, most = min(sizes.values()), max(sizes.values())
    limit = (least + fraction * (most - least)) * (1 + 1e-9)
    chosen = choose_formats(graph, sites, FORMATS, COSTS, Budget(kind, limit), PRICES)
    picks = tuple(FORMATS.index(chosen[site.name]) for site in sites)

    def cost(picks: tuple[int, ...]) -> float:
        return sum(row[i] for row, i in zip(COSTS, picks, strict=True))

    assert sizes[picks] <= limit
    assert cost(picks) == pytest.approx(min(cost(other) for other in EVERY if sizes[other] <= limit), abs=1e-9)


@pytest.mark.parametrize("limit", [0.07001, 0.3, 0.76, 5.0])
def test_the_bytes_are_the_least_that_the_divergence_allows(graph: GraphModule, limit: float) -> None:
    sites = four(graph)
    chosen = choose_formats(graph, sites, FORMATS, COSTS, Budget("kl_divergence", limit), None)
    picks = tuple(FORMATS.index(chosen[site.name]) for site in sites)
    divergence = {other: sum(row[i] for row, i in zip(COSTS, other, strict=True)) for other in EVERY}
    assert divergence[picks] <= limit * (1 + 1e-9)
    assert stored(graph, picks) == min(stored(graph, p) for p in EVERY if divergence[p] <= limit)


def test_an_image_has_as_many_rows_as_patches() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)).eval()
    x = torch.zeros(2, 3, 8, 8)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    for captured in (capture(module, (x,)), capture(module, (x,), dynamic_shapes=shapes)):
        sites = linear_sites(captured)
        parts = linear_seconds(16, 27, 36, FORMATS[0], PRICES), linear_seconds(4, 16 * 36, 1, FORMATS[0], PRICES)
        assert parts == pytest.approx((2 * 16 * 27 * 36 * 2e-10, FORMATS[0].packed_bytes(4, 16 * 36) * 1e-9))
        seconds = sum(parts)
        costs = [[0.0], [0.0]]
        choose_formats(captured, sites, FORMATS[:1], costs, Budget("latency_ms", 1e3 * seconds * (1 + 1e-9)), PRICES)
        with pytest.raises(UsageError, match=r"latency_ms .*less than the smallest choice takes.* ms; add a smaller"):
            choose_formats(captured, sites, FORMATS[:1], costs, Budget("latency_ms", 999 * seconds), PRICES)


@pytest.mark.parametrize(("given", "words"), [
    ({}, "exactly one budget of bits, weight_bytes, latency_ms, kl_divergence; found none"),
    ({"bits": 4.0, "kl_divergence": 0.1}, "found bits and kl_divergence"),
    ({"weight_bytes": "4 ms"}, r"weight_bytes '4 ms': write a number and a unit \(none, B, kB, KB"),
    ({"latency_ms": "fast"}, r"units?.*none, ms, s"),
    ({"kl_divergence": 0.0}, "number above 0"),
    ({"latency_ms": math.inf}, "number above 0"),
    ({"weight_bytes": -5.0}, "number above 0"),
    ({"kl_divergence": math.nan}, "number above 0"),
])  # fmt: skip
def test_what_is_no_budget_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        only_budget("mixed_precision", {**dict.fromkeys(BUDGETS), **given})


def test_units() -> None:
    assert only_budget("x", {"weight_bytes": "1.5 MiB"}) == Budget("weight_bytes", 1.5 * 2**20)
    assert only_budget("x", {"latency_ms": "2s"}) == Budget("latency_ms", 2000)
    assert only_budget("x", {"latency_ms": 0.5}) == Budget("latency_ms", 0.5)
    assert str(Budget("weight_bytes", 4e6)) == "weight_bytes 4,000,000" and str(Budget("bits", 4.25)) == "bits 4.25"


def test_what_cannot_be_reached_is_said(graph: GraphModule) -> None:
    sites = four(graph)
    with pytest.raises(UsageError, match=r"weight_bytes 100: what is not matched takes [\d,]+; the budget, -.*bytes"):
        choose_formats(graph, sites, FORMATS, COSTS, Budget("weight_bytes", 100), None)
    with pytest.raises(UsageError, match=r"0\.01, is less than .* 0\.07 nats a token; add a larger scheme"):
        choose_formats(graph, sites, FORMATS, COSTS, Budget("kl_divergence", 0.01), None)
    with pytest.raises(UsageError, match=r"latency_ms 1: what work costs on this machine is not known"):
        choose_formats(graph, sites, FORMATS, COSTS, Budget("latency_ms", 1), None)
