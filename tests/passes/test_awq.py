"""AWQ: the formula, its law (never worse than unscaled rounding on the rows it sees), dead channels."""

from __future__ import annotations

import pytest
import torch

from compressor.calibration import load_samples
from compressor.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.formats import Format
from compressor.packing import dequantize
from compressor.passes.awq import _STRENGTHS, Awq, awq_quantize, awq_scale
from compressor.passes.rtn import Rtn, rtn_quantize
from compressor.passes.smoothquant import output_error
from compressor.pipeline import Context, Pipeline
from compressor.recipe import load_text_spec
from compressor.resources import resource


def test_the_scale_is_equation_5() -> None:
    size = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 9 + 1e-3
    for strength in _STRENGTHS:
        scale = awq_scale(size, strength)
        assert float(scale.max() * scale.min()) == pytest.approx(1)
        assert torch.allclose(scale / scale[0], (size / size[0]).double().pow(strength))
    dead = size.clone()
    dead[3] = 0
    assert bool(torch.isfinite(awq_scale(dead, 0.95)).all()) and bool((awq_scale(dead, 0.95) > 0).all())
    assert torch.equal(awq_scale(torch.zeros(4), 0.5), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["W4A16_G32", "W3A16_G32", "FP4_E2M1_G32", "NF4_G32"])
def test_a_searched_scale_is_never_worse_and_helps_with_salient_channels(name: str) -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse(name)
    x = torch.randn(256, 64, generator=rng)
    x[:, [3, 40]] *= 30
    weights = [torch.randn(48, 64, generator=rng)]
    errors = [output_error(x, weights, awq_scale(x.abs().mean(0), s).float(), fmt) for s in _STRENGTHS]
    assert min(errors) < errors[0] * 0.6
    assert errors[0] == pytest.approx(output_error(x, weights, torch.ones(64), fmt))


def test_clipping_is_never_worse_under_the_inputs() -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse("W3A16_G32")
    weight, squares = torch.randn(20, 96, generator=rng) ** 3, torch.rand(96, generator=rng) + 0.1

    def lost(values: torch.Tensor) -> float:
        return float(((values - weight).square() @ squares).sum())

    assert lost(dequantize(awq_quantize(weight, squares, fmt))) < lost(dequantize(rtn_quantize(weight, fmt)))


def test_the_pass_replaces_every_linear_and_loses_less_than_rtn() -> None:
    model, targets = resource("models") / "reference", r"re:model\.layers\.[01]\."
    spec = load_text_spec("python_docs").model_copy(update={"samples": 8, "sequence_length": 128})
    samples = load_samples(spec, model, 2048)

    def lost(*steps: object) -> float:
        graph, ctx = capture(model), Context(samples=samples)
        info = graph.meta["model"]
        caches = [[torch.zeros(8, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
        inputs = (samples.ids, torch.arange(128), torch.arange(128), *caches)
        with torch.no_grad():
            before = graph(*inputs)[0]
            graph = Pipeline(steps).run(graph, ctx)  # type: ignore[arg-type]
            after = graph(*inputs)[0]
        assert [record.format for record in ctx.records] == ["W3A16_G128"] * 14
        return float((after - before).norm() / before.norm())

    assert lost(Awq("W3A16_G128", targets=targets)) < 0.85 * lost(Rtn("W3A16_G128", targets=targets))


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="nearest"):
        Awq("W4")
    with pytest.raises(CompressorError, match="NaN"):
        awq_quantize(torch.full((2, 32), float("nan")), torch.ones(32), Format.parse("W4A16_G32"))
