"""SqueezeLLM: equation 4 against plain rounding, the choice of outliers, the pass on the reference model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.rtn import Rtn
from compressor.passes.squeezellm import Squeezellm, squeezellm_quantize
from compressor.pipeline.context import Context


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


def test_the_pass_loses_less_than_rounding_to_nearest(
    two_blocks: Callable[..., tuple[torch.Tensor, torch.Tensor, Context]],
) -> None:
    def lost(step: object) -> float:
        before, after, ctx = two_blocks(step)
        assert ctx.records[0].site.startswith("model.layers.0")
        p, q = (torch.log_softmax(logits.double(), -1) for logits in (before, after))
        return float((p.exp() * (p - q)).sum(-1).mean())

    targets = r"re:model\.layers\.[01]\."
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
