"""SqueezeLLM: equation 4 against plain rounding, the choice of outliers, the pass on the reference model."""

from __future__ import annotations

import pytest
import torch

from compressor.calibration import load_samples
from compressor.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.formats import Format
from compressor.packing import dequantize
from compressor.passes.rtn import Rtn, rtn_quantize
from compressor.passes.squeezellm import Squeezellm, squeezellm_quantize
from compressor.pipeline import Context, Pipeline
from compressor.recipe import load_text_spec
from compressor.resources import resource


@pytest.mark.parametrize("name", ["LUT2", "LUT3", "LUT4", "LUT3_G32", "LUT3_S1"])
def test_the_weighted_error_falls(name: str) -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse(name)
    weight, sensitivity = torch.randn(20, 96, generator=rng), torch.rand(20, 96, generator=rng) ** 6

    def lost(values: torch.Tensor) -> float:
        return float((sensitivity * (values - weight).square()).sum())

    assert lost(dequantize(squeezellm_quantize(weight, sensitivity, fmt))) < 0.8 * lost(
        dequantize(rtn_quantize(weight, fmt))
    )


def test_outliers_are_the_most_sensitive_and_the_largest_weights() -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse("LUT3_S0.5")
    weight, sensitivity = torch.randn(64, 256, generator=rng), torch.rand(64, 256, generator=rng)
    count = fmt.outliers(64, 256)
    assert count == 82
    chosen = torch.randperm(weight.numel(), generator=rng)[:count]
    sensitive, large = chosen[: round(count / 9)], chosen[round(count / 9) :]
    sensitivity.view(-1)[sensitive] = 1e9
    weight.view(-1)[large] += 20
    packed = squeezellm_quantize(weight, sensitivity, fmt)
    starts = packed.parts["outlier_starts"].long()
    rows = torch.arange(64).repeat_interleave(starts.diff())
    assert set((rows * 256 + packed.parts["outlier_columns"]).tolist()) == set(chosen.tolist())
    assert float((dequantize(packed) - weight).view(-1)[chosen].abs().max()) < 0.02


def test_the_pass_loses_less_than_rounding_to_nearest() -> None:
    model, targets = resource("models") / "reference", r"re:model\.layers\.[01]\."
    spec = load_text_spec("python_docs").model_copy(update={"samples": 8, "sequence_length": 64})
    samples = load_samples(spec, model, 2048)

    def lost(*steps: object) -> float:
        graph, ctx = capture(model), Context(samples=samples)
        info = graph.meta["model"]
        caches = [[torch.zeros(8, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
        inputs = (samples.ids, torch.arange(64), torch.arange(64), *caches)
        with torch.no_grad():
            before = graph(*inputs)[0]
            graph = Pipeline(steps).run(graph, ctx)  # type: ignore[arg-type]
            after = graph(*inputs)[0]
        assert len(ctx.records) == 14 and ctx.records[0].site.startswith("model.layers.0")
        p, q = (torch.log_softmax(logits.double(), -1) for logits in (before, after))
        return float((p.exp() * (p - q)).sum(-1).mean())

    plain = lost(Rtn("LUT3", targets=targets))
    assert lost(Squeezellm("LUT3", targets=targets)) < 0.9 * plain
    assert lost(Squeezellm("LUT3_S0.45", targets=targets)) < 0.85 * plain


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="no codebooks"):
        Squeezellm("W4A16")
    with pytest.raises(CompressorError, match="NaN"):
        squeezellm_quantize(torch.full((2, 32), float("nan")), torch.ones(2, 32), Format.parse("LUT3"))
    values = dequantize(squeezellm_quantize(torch.randn(3, 40), torch.zeros(3, 40), Format.parse("LUT3_S1")))
    assert bool(torch.isfinite(values).all())
