"""Mixed precision: sensitivities against running the whole model, the budget, and GPTQ in several formats at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from captures import capture_once
from families import DECODERS, make
from packed_models import random_samples
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.text import Samples, load_samples
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import linear_sites, match_sites
from compressor.host.resources import resource
from compressor.numerics.nearest import awq_quantize
from compressor.passes.mixed_precision import MixedPrecision
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.sensitivities import sensitivities
from compressor.recipe.recipe import load_text_spec

MODEL = resource("models") / "reference"
TARGETS = r"re:model\.layers\.[03]\."
BITS = 3.3


@pytest.fixture(scope="module")
def samples() -> Samples:
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 64})
    return load_samples(spec, MODEL, 2048)


def logits(graph: GraphModule, ids: Tensor) -> Tensor:
    info, length = graph.meta["model"], torch.arange(ids.shape[1])
    caches = [[torch.zeros(len(ids), info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    with torch.no_grad():
        result: Tensor = graph(ids, length, length, *caches)[0]
    return result


def test_a_sensitivity_is_the_divergence_of_the_whole_model(samples: Samples) -> None:
    graph, formats = capture_once(MODEL), [Format.parse("W2A16_G64"), Format.parse("W4A16_G128")]
    sites = match_sites(linear_sites(graph), TARGETS)[0]
    found = sensitivities(graph, Context(), samples.ids, sites, formats)
    assert list(found) == [site.name for site in sites]
    dense = torch.log_softmax(logits(graph, samples.ids).double(), -1)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.3.self_attn.k_proj"):
        other = capture_once(MODEL)
        site = next(site for site in linear_sites(other) if site.name == name)
        seen: list[Tensor] = []

        def read(node: torch.fx.Node, value: Tensor, site=site, seen=seen) -> None:  # type: ignore[no-untyped-def]
            if node is site.input:
                seen.append(value)

        class Reader(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node, read=read) -> object:  # type: ignore[no-untyped-def]
                value = super().run_node(n)
                read(n, value)
                return value

        info, length = other.meta["model"], torch.arange(64)
        empty = torch.zeros(4, info.kv_heads, 1, info.head_dim)
        with torch.no_grad():
            Reader(other).run(samples.ids, length, length, *[empty] * (2 * info.layers), enable_io_processing=False)
        squares = seen[0].double().square().mean((0, 1))
        weight = other.get_parameter(site.weight_name).detach().float()
        replace_linear(other, site, awq_quantize(weight, squares, formats[0]))
        other.recompile()
        rounded = torch.log_softmax(logits(other, samples.ids).double(), -1)
        expected = float((dense.exp() * (dense - rounded)).sum(-1).mean())
        assert found[name][0] == pytest.approx(expected, rel=1e-3)
        assert 0 < found[name][1] < found[name][0] / 5


def test_the_budget_is_kept_and_used(samples: Samples) -> None:
    graph, ctx = capture_once(MODEL), Context(samples=samples)
    weights = sum(site.out_features * site.in_features for site in match_sites(linear_sites(graph), TARGETS)[0])
    step = MixedPrecision(bits=BITS, targets=TARGETS)
    planned = step.plan(capture_once(MODEL, weights=False), Context())
    dense = logits(graph, samples.ids)
    graph = Pipeline([step]).run(graph, ctx)
    stored = sum(record.bytes_after for record in ctx.records)
    assert 0.97 * BITS < 8 * stored / weights <= BITS
    formats = {record.format for record in ctx.records}
    assert (
        len(ctx.records) == 14
        and len(formats) > 1
        and {record.pass_name for record in ctx.records} == {"mixed_precision"}
    )
    (note,) = ctx.notes
    assert "bits a weight" in note and all(name in note for name in formats)
    assert float((logits(graph, samples.ids) - dense).norm() / dense.norm()) < 0.2
    assert sum(plan.bytes_after for plan in planned if plan.format) == pytest.approx(stored, rel=0.03)


SMALL = ("W2A16_G16", "W4A16_G16", "W8A16")
PRICES = {"read_byte": 1e-9, "matmul_flop": 1e-12, "int8_op": 1e-12}


@pytest.fixture(scope="module")
def small() -> GraphModule:
    sizes = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return capture_once(transformers.LlamaForCausalLM(config).eval())


@pytest.mark.parametrize("budget", [{"weight_bytes": "35 KB"}, {"latency_ms": "0.024ms"}, {"kl_divergence": 0.03}])
def test_other_budgets_are_kept_used_and_planned(small: GraphModule, budget: dict[str, Any]) -> None:
    ids = torch.randint(50, (8, 24), generator=torch.Generator().manual_seed(0))
    ctx = Context(samples=Samples(ids, torch.empty(0), "", "by chance"), prices=PRICES)
    step = MixedPrecision(**budget, schemes=SMALL)
    graph, planning, shadow = clone_graph(small), Context(prices=PRICES), clone_graph(small)
    planned = step.plan(shadow, planning)
    graph = Pipeline([step]).run(graph, ctx)
    formats = {record.format for record in ctx.records}
    assert len(formats) > 1
    linears = sum(record.bytes_after for record in ctx.records)  # all of them: time is that of their bytes
    if "kl_divergence" in budget:
        dense, rounded = (torch.log_softmax(logits(g, ids).double(), -1) for g in (small, graph))
        measured = float((dense.exp() * (dense - rounded)).sum(-1).mean())
        _, note = ctx.notes
        expected, found = map(float, re.findall(r"([\d.e-]+) (?:nats|measured)", note))
        assert 0.9 * 0.03 < expected <= 0.03 and found == pytest.approx(measured, rel=5e-3)
        assert ("above the budget" in note) == (measured > 0.03)
        (said,) = planning.notes
        assert "planned for the largest, W8A16" in said and {plan.format for plan in planned} == {"W8A16"}
        return
    used, most = (weight_bytes(graph), 35e3) if "weight_bytes" in budget else (linears * 1e-6, 0.024)
    assert 0.95 * most < used <= most
    assert weight_bytes(shadow) == pytest.approx(weight_bytes(graph), rel=0.05)


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="two different"):
        MixedPrecision(bits=4, schemes=("W4A16_G128", "W4A16"))
    with pytest.raises(UsageError, match="bits 99"):
        MixedPrecision(bits=99)
    with pytest.raises(UsageError, match="exactly one budget"):
        MixedPrecision()
    module = capture_once(torch.nn.Sequential(torch.nn.Linear(32, 4)).eval(), (torch.zeros(2, 32),))
    with pytest.raises(
        UsageError, match=r"kl_divergence 0\.1: Sequential is not a decoder.*give bits, weight_bytes or"
    ):
        MixedPrecision(kl_divergence=0.1).requires(module, Context())
    with pytest.raises(UsageError, match=r"bits 1\.5: .*add a smaller scheme"):
        MixedPrecision(bits=1.5).plan(capture_once(MODEL, weights=False), Context())


def test_experts_count_as_often_as_tokens_choose_them() -> None:
    """Divergences are measured with the model's own routing: an idle expert costs nothing and gets the fewest bits."""
    kind, options = DECODERS["OLMoE"]
    model = make(kind, {**options, "num_experts": 5}, True)
    with torch.no_grad():
        for layer in model.model.layers:  # two experts are chosen, by a sign; the fifth one never
            gate = layer.mlp.gate.weight
            gate.copy_(torch.tensor([1.0, 2.0, -1.0, -2.0, 0.0])[:, None] * gate[0].clone())
    graph, schemes = capture_once(model), ("W2A16_G32", "W4A16_G32", "W8A16")
    sites, samples = match_sites(linear_sites(graph), "Expert")[0], random_samples(97, 64)
    costs = sensitivities(graph, Context(), samples.ids, sites, [Format.parse(name) for name in schemes])
    idle = {name for name in costs if name.endswith(".4")}
    assert len(idle) == 4 and all(costs[name] == [0.0] * 3 for name in idle)
    assert all(costs[name][0] > 0 for name in costs.keys() - idle)
    MixedPrecision(bits=5.5, schemes=schemes, targets="Expert").run(graph, ctx := Context(samples=samples))
    formats = {record.site: record.format for record in ctx.records}
    assert {formats[name] for name in idle} == {"W2A16_G32"}
    assert {formats[name] for name in costs.keys() - idle} <= {"W4A16_G32", "W8A16"}
