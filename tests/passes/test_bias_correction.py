"""Bias correction: the formula in float64, the law (means over the samples are the dense model's), and refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packed_models import drop_weights
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.errors import CompressorError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.formats.rounded_activations import round_activations
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import packed_weight
from compressor.graph.sites import linear_sites, packed_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.bias_correction import BiasCorrection, Means, corrected_bias
from compressor.passes.rotation import Rotation
from compressor.passes.rtn import Rtn
from compressor.passes.smoothquant import Smoothquant
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline

IDS = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(2))
SAMPLES = Samples(IDS, torch.empty(0, dtype=torch.int64), "", "random tokens")
BIASED = ("q_proj", "k_proj", "v_proj")


@cache
def captured() -> GraphModule:
    """Attention's first three linears have biases, the others have none."""
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, mean=0.1, std=0.2)
    return capture(model)


def means(graph: GraphModule) -> dict[str, Tensor]:
    """Return the mean output of each linear over all tokens, float64 [out]."""
    names = {site.node: site.name for site in (*linear_sites(graph), *packed_sites(graph))}
    found: dict[str, Tensor] = {}

    class Tap(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n in names:
                found[names[n]] = value.double().flatten(0, -2).mean(0)
            return value

    caches = [torch.zeros(4, 2, 1, 16)] * 4
    with torch.no_grad():
        Tap(graph).run(IDS, torch.arange(24), torch.arange(24), *caches)
    return found


def furthest(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scheme", ["W3A16_G32", "W4A8_G32", "NF4_G64"])
def test_the_bias_is_the_definition(scheme: str) -> None:
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 64, generator=rng), torch.randn(40, generator=rng)
    x, dense = torch.randn(100, 64, generator=rng) + 0.5, torch.randn(100, 64, generator=rng) + 0.6
    packed = rtn_quantize(weight, Format.parse(scheme))
    inputs = Means(64, {packed.format.activations})
    for part in (slice(0, 60), slice(60, 100)):
        inputs.add(x[part], dense[part])
    fixed = corrected_bias(weight, bias, packed, inputs.dense, inputs.now(packed.format.activations))
    taken = round_activations(x, packed.format.activations)
    now = (taken.double() @ dequantize(packed).double().t()).mean(0)
    wanted = (dense.double() @ weight.double().t() + bias).mean(0)
    assert furthest(now + fixed, wanted) < 1e-6
    without = corrected_bias(weight, None, packed, inputs.dense, inputs.now(packed.format.activations))
    assert torch.allclose(without + bias, fixed, atol=1e-5)


@pytest.mark.parametrize("scheme", ["W3A16_G32", "W4A8_G32"])
def test_means_are_the_dense_models(scheme: str) -> None:
    dense, ctx = captured(), Context(samples=SAMPLES)
    wanted, plain = means(dense), means(Rtn(scheme, ignore="lm_head").run(clone_graph(dense), Context()))
    passes = [Rtn(scheme, ignore="lm_head"), BiasCorrection(add=True)]
    graph = Pipeline(passes).run(clone_graph(dense), ctx)
    corrected = means(graph)
    for site in packed_sites(graph):
        assert furthest(corrected[site.name], wanted[site.name]) < 2e-5, site.name
        assert furthest(plain[site.name], wanted[site.name]) > 1e-3, site.name
    added = 4 * 2 * (64 + 96 + 96 + 64)
    assert ctx.notes == [f"bias_correction: biases that were added take {added:,} bytes"]
    assert ctx.dense is None and not packed_sites(dense)  # the pipeline's copy goes with it


def test_linears_without_a_bias_are_left_and_named() -> None:
    ctx = Context(samples=SAMPLES)
    rtn = Rtn("W3A16_G32", ignore="lm_head")
    graph = Pipeline([rtn, BiasCorrection(targets="re:.*layers.0")]).run(clone_graph(captured()), ctx)
    plain = rtn.run(clone_graph(captured()), Context())
    assert weight_bytes(graph) == weight_bytes(plain)
    changed = {
        site.name
        for site in packed_sites(graph)
        if site.bias_name and not torch.equal(graph.get_parameter(site.bias_name), plain.get_parameter(site.bias_name))
    }
    assert changed == {f"model.layers.0.self_attn.{name}" for name in BIASED}
    (note,) = ctx.notes
    assert "no bias of its own" in note and "o_proj" in note and "down_proj" in note and "q_proj" not in note
    for site in packed_sites(plain):
        same = next(other for other in packed_sites(graph) if other.name == site.name)
        assert torch.equal(packed_weight(graph, same).parts["codes"], packed_weight(plain, site).parts["codes"])
    with pytest.raises(UsageError, match=r"`add: true`"):
        Pipeline([rtn, BiasCorrection(targets="o_proj")]).run(clone_graph(captured()), Context(samples=SAMPLES))


def test_it_follows_a_rotation_and_the_plan_knows_its_bytes() -> None:
    passes = [Rotation(ignore="lm_head"), Rtn("W4A16_G32", ignore="lm_head"), BiasCorrection(add=True)]
    graph = Pipeline(passes).run(clone_graph(captured()), Context(samples=SAMPLES))
    wanted, found = means(captured()), means(graph)  # keys are not rotated
    assert furthest(found["model.layers.1.self_attn.k_proj"], wanted["model.layers.1.self_attn.k_proj"]) < 2e-5
    shadow, planned = clone_graph(captured()), []
    drop_weights(shadow)
    for step in passes:
        planned = step.plan(shadow, Context())
    assert weight_bytes(shadow) == weight_bytes(graph)
    assert sum(plan.needs is not None for plan in planned) == 14


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, threads, found = torch.randn(500, 90, generator=torch.Generator().manual_seed(0)), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            inputs = Means(90, {None, Activations()})
            inputs.add(x, x + 1)
            found.append(torch.stack([inputs.now(None), inputs.now(Activations()), inputs.dense]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.allclose(found[0][0], x.double().mean(0), atol=1e-14)


def test_what_cannot_be_compared_is_refused() -> None:
    rtn, fix = Rtn("W4A16_G32", targets="q_proj"), BiasCorrection()
    with pytest.raises(UsageError, match="no linear is packed"):
        Pipeline([fix]).run(clone_graph(captured()), Context(samples=SAMPLES))
    with pytest.raises(UsageError, match="needs calibration samples"):
        Pipeline([rtn, fix]).run(clone_graph(captured()), Context())
    with pytest.raises(CompressorError, match="runs in a pipeline"):
        fix.run(rtn.run(clone_graph(captured()), Context()), Context(samples=SAMPLES))
    late = [rtn, Smoothquant(targets="down_proj"), fix]
    with pytest.raises(
        CompressorError, match=r"mlp\..*_proj\.weight was changed after the first linear had been packed"
    ):
        Pipeline(late).run(clone_graph(captured()), Context(samples=SAMPLES))
