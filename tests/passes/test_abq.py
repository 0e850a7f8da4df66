"""ABQ: the balance scale by its formula, its law, the inputs that GPTQ sees, and the pass against round to nearest."""

from __future__ import annotations

import copy

import pytest
import torch
from captures import capture_once

from compressor.calibration.statistics import Inputs
from compressor.data.text import load_samples
from compressor.errors import CompressorError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.graph.folding import ScaleTarget
from compressor.host.resources import resource
from compressor.numerics.nearest import awq_quantize
from compressor.numerics.scale_search import output_error
from compressor.passes.abq import _STRENGTHS, Abq, RoundedInputs, balance_scale, search_balance
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_text_spec


def seen(x: torch.Tensor) -> Inputs:
    inputs = Inputs(x.shape[1])
    inputs.add(x, x)
    return inputs


def test_the_scale_is_the_formula() -> None:
    rng = torch.Generator().manual_seed(0)
    size, weights = torch.rand(40, generator=rng) + 0.01, [torch.randn(n, 40, generator=rng) for n in (8, 5)]
    tops = torch.cat(weights).abs().amax(0).double()
    for alpha, beta in _STRENGTHS:
        scale = balance_scale(size, weights, alpha, beta)
        assert float(scale.max() * scale.min()) == pytest.approx(1)
        expected = size.double() ** alpha / tops**beta
        assert torch.allclose(scale / scale[0], expected / expected[0])
    size[3], weights[0][:, 5], weights[1][:, 5] = 0.0, 0.0, 0.0
    assert bool(torch.isfinite(balance_scale(size, weights, 0.75, 0.5)).all())
    assert torch.equal(balance_scale(torch.zeros(40), weights, 0.5, 0.5), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("name", ["BIP2A8_G32", "BAL2A8_G32", "BIP4A4_C", "BIP1A16_G32"])
def test_a_searched_scale_is_never_worse_and_helps_with_salient_channels(name: str) -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse(name)
    x = torch.randn(256, 64, generator=rng)
    x[:, [3, 40]] *= 30
    weights, inputs = [torch.randn(48, 64, generator=rng)], seen(x)
    scale = search_balance(fmt, inputs, weights, ScaleTarget(())).float()
    cut = lambda w, s, f: awq_quantize(w, inputs.mean_square / s.double().square(), f)  # noqa: E731
    found, unscaled = (output_error(inputs.rows, weights, s, fmt, cut) for s in (scale, torch.ones(64)))
    assert found < 0.95 * unscaled
    assert unscaled < output_error(inputs.rows, weights, torch.ones(64), fmt)  # ranges that are cut lose less


def test_gptq_sees_the_inputs_as_they_will_be_rounded() -> None:
    rng = torch.Generator().manual_seed(0)
    x, dense = torch.randn(2, 50, 24, generator=rng)
    statistic = RoundedInputs(24, Activations(3))
    statistic.add(x, dense)
    step = x.double().abs().amax(1, keepdim=True) / 3
    rounded = torch.round(x / step) * step
    assert torch.allclose(statistic.value.double(), 2 / 50 * rounded.t() @ rounded, rtol=1e-4, atol=1e-5)
    assert statistic.cross is not None
    assert torch.allclose(statistic.cross.double(), 2 / 50 * (dense - rounded).t() @ rounded, rtol=1e-4, atol=1e-5)


def test_the_pass_replaces_every_linear_and_loses_less_than_rtn() -> None:
    model, targets = resource("models") / "reference", r"re:model\.layers\.0\.self_attn\.[qkv]_proj"
    spec = load_text_spec("python_docs").model_copy(update={"samples": 2, "sequence_length": 128})
    samples, dense = load_samples(spec, model, 2048), capture_once(model)

    def lost(step: object) -> float:
        graph, ctx = copy.deepcopy(dense), Context(samples=samples)
        info = graph.meta["model"]
        caches = [[torch.zeros(2, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
        inputs = (samples.ids, torch.arange(128), torch.arange(128), *caches)
        with torch.no_grad():
            before = graph(*inputs)[0]
            graph = Pipeline([step]).run(graph, ctx)  # type: ignore[list-item]
            after = graph(*inputs)[0]
        assert [record.format for record in ctx.records] == ["BIP2A4_G64"] * 3
        assert all(r.rtn_error is None or 0 < r.error <= r.rtn_error for r in ctx.records)
        return float((after - before).norm() / before.norm())

    assert lost(Abq("BIP2A4_G64", targets=targets)) < 0.7 * lost(Rtn("BIP2A4_G64", targets=targets))


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="nearest"):
        Abq("BIP2")
    with pytest.raises(CompressorError, match="NaN"):
        search_balance(
            Format.parse("BIP2A8_G32"), seen(torch.ones(4, 32)), [torch.full((2, 32), float("nan"))], ScaleTarget(())
        )
