"""Adaptive rounding: its law, what it gains, bad input, and the pass on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.guided_rows import guided_rows
from compressor.calibration.statistics import Hessian
from compressor.capture.capture import capture
from compressor.data.text import Samples, load_samples
from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites, match_sites
from compressor.host.resources import resource
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.adaptive_rounding import AdaptiveRounding, adaptive_round
from compressor.passes.gptq import gptq_quantize
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.plan.streaming import plan_calibration
from compressor.recipe.recipe import load_text_spec

FORMATS = ["W4A16_G32", "W3A16_G32", "W2A16_G64", "W4A16_ASYM_G32", "W8A8", "W3A16_ASYM_T"]
FORMATS += ["FP4_E2M1_G32", "FP6_E3M2_G32", "NF4_G32", "MXFP4", "NVFP4"]


def problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Make a weight and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mix
    return weight, 2 / len(inputs) * inputs.T @ inputs


def loss(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    difference = weight.double() - values.double()
    return float(((difference @ hessian.double()) * difference).sum())


@pytest.mark.parametrize("name", FORMATS)
def test_the_outputs_lose_less_than_gptqs(name: str) -> None:
    fmt, (weight, hessian) = Format.parse(name), problem(32, 96)
    packed, info = adaptive_round(weight, hessian, fmt, steps=200)
    assert info.method == "adaptive_rounding" and packed.format == fmt
    norm = loss(weight, torch.zeros_like(weight), hessian)
    assert info.error == pytest.approx(loss(weight, dequantize(packed), hessian) / norm)
    assert info.rtn_error == pytest.approx(loss(weight, dequantize(rtn_quantize(weight, fmt)), hessian) / norm)
    assert info.error < gptq_quantize(weight, hessian, fmt)[1].error < info.rtn_error


@given(
    name=st.sampled_from(FORMATS),
    columns=st.integers(1, 70),
    rank=st.integers(0, 70),
    power=st.integers(-12, 12),
    spread=st.integers(0, 6),
    dead=st.integers(0, 3),
    on_grid=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_adversarial_inputs_give_finite_values_and_no_more_error_than_rtn(
    name: str, columns: int, rank: int, power: int, spread: int, dead: int, on_grid: bool, seed: int
) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator)
    weight *= 10.0 ** torch.randint(-spread, spread // 2 + 1, (columns,), generator=generator)
    weight[:, : dead // 2] = 0
    if on_grid:
        weight = dequantize(rtn_quantize(weight, fmt))
    inputs = torch.randn(rank, columns, generator=generator) * 10.0**power
    inputs *= 10.0 ** torch.randint(-spread, spread + 1, (columns,), generator=generator)
    inputs[:, :dead] = 0
    hessian = inputs.T @ inputs
    packed, info = adaptive_round(weight, hessian, fmt, steps=10)
    values = dequantize(packed)
    assert torch.isfinite(values).all()
    rtn_loss = loss(weight, dequantize(rtn_quantize(weight, fmt)), hessian)
    assert loss(weight, values, hessian) <= rtn_loss * (1 + 1e-9) + 1e-300
    assert 0 <= info.error <= info.rtn_error


def test_where_rounding_to_nearest_is_better_it_is_kept() -> None:
    weight, hessian = problem(8, 32)
    fmt = Format.parse("FP4_E2M1_G32")
    exact = dequantize(rtn_quantize(weight, fmt))
    packed, info = adaptive_round(exact, hessian, fmt, steps=5)
    assert info.error == info.rtn_error == 0 and torch.equal(dequantize(packed), exact)


def test_dead_columns_are_rounded_to_nearest_and_counted() -> None:
    weight, hessian = problem(8, 64)
    hessian[5], hessian[:, 5] = 0, 0
    fmt = Format.parse("W4A16_G32")
    packed, info = adaptive_round(weight, hessian, fmt, steps=50, observer="minmax")
    assert info.dead_columns == 1
    assert torch.equal(dequantize(packed)[:, 5], dequantize(rtn_quantize(weight, fmt))[:, 5])


def test_bad_input() -> None:
    weight, hessian = problem(4, 32)
    fmt = Format.parse("W4A16_G32")
    with pytest.raises(CompressorError, match="inputs overflow"):
        adaptive_round(weight, hessian * float("inf"), fmt)
    with pytest.raises(CompressorError, match="NaN"):
        adaptive_round(weight * float("nan"), hessian, fmt)
    with pytest.raises(UsageError, match="nearest"):
        AdaptiveRounding("W4")
    with pytest.raises(UsageError, match="steps 0"):
        AdaptiveRounding("W4A16_G32", steps=0)


def test_guided_rounding_loses_less_of_what_guides_it(
    random_llama: Callable[..., transformers.LlamaForCausalLM],
) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    graph = capture(random_llama(**sizes, initializer_range=0.4))
    ids, fmt = torch.randint(20, (2, 32), generator=torch.Generator().manual_seed(0)), Format.parse("W2A16_G16")
    sites = match_sites(linear_sites(graph), "up_proj")[0]
    weights = guided_rows(graph, ids, sites, seed=0)
    ((_, plain),) = CalibrationRun(graph, ids, sites, Hessian, CalibrationOptions(rounded=True)).groups()
    ((_, guided),) = CalibrationRun(
        graph, ids, sites, Hessian, CalibrationOptions(row_weights=weights, rounded=True)
    ).groups()
    weight = graph.get_parameter(sites[0].weight_name).detach().float()
    values = [dequantize(adaptive_round(weight, h.value, fmt, steps=40)[0]) for h in (plain, guided)]
    assert loss(weight, values[1], guided.value) < 0.995 * loss(weight, values[0], guided.value)
    assert loss(weight, values[0], plain.value) < 0.995 * loss(weight, values[1], plain.value)
    ctx = Context(samples=Samples(ids, torch.empty(0), "", "by chance"))
    step = AdaptiveRounding(fmt.name, "up_proj", steps=40, match_dense=False, task_guided=True)
    Pipeline([step]).run(graph, ctx)
    norm = loss(weight, torch.zeros_like(weight), guided.value)
    assert ctx.records[0].error == pytest.approx(loss(weight, values[1], guided.value) / norm, rel=1e-4)


def test_the_pass_does_what_it_plans_and_says_what_it_reached() -> None:
    model, step = resource("models") / "reference", AdaptiveRounding("W3A16_G128", r"re:.*0\.self_attn", steps=20)
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 128})
    ctx = Context(samples=load_samples(spec, model, 2048))
    graph = capture(model)
    dense = clone_graph(graph)
    plans = [plan for plan in step.plan(clone_graph(graph), ctx) if plan.format]
    Pipeline([step]).run(graph, ctx)
    assert [(r.site, r.format, r.bytes_after) for r in ctx.records] == [
        (plan.site, plan.format, plan.bytes_after) for plan in plans
    ]
    assert len(plans) == 4 and all(plan.work and plan.needs for plan in plans)
    guided = [plan for plan in replace(step, task_guided=True).plan(clone_graph(dense), ctx) if plan.format]
    local, both = (plan_calibration(dense, given, 4, 128) for given in (plans, guided))
    # Forwards twice and backwards once, which is as much as two forwards.
    products = 4 * sum(2 * 4 * 128 * site.out_features * site.in_features for site in linear_sites(dense))
    assert both.work["matmul_flop"] - local.work["matmul_flop"] == pytest.approx(products, rel=0.1)
    assert both.hidden_bytes > local.hidden_bytes and both.working_bytes >= local.working_bytes
    for record in ctx.records:
        assert record.error_of == "output" and record.rtn_error is not None
        assert record.error < 0.5 * record.rtn_error
