"""AWQ: the formula, its law (never worse than unscaled rounding on the rows it sees), dead channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.numerics.nearest import awq_quantize, rtn_quantize
from compressor.numerics.scale_search import output_error
from compressor.passes.awq import _STRENGTHS, Awq, awq_scale
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context


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


def test_the_pass_replaces_every_linear_and_loses_less_than_rtn(
    two_blocks: Callable[..., tuple[torch.Tensor, torch.Tensor, Context]],
) -> None:
    def lost(step: object) -> float:
        before, after, ctx = two_blocks(step)
        assert [record.format for record in ctx.records] == ["W3A16_G128"] * 14
        return float((after - before).norm() / before.norm())

    targets = r"re:model\.layers\.[01]\."
    assert lost(Awq("W3A16_G128", targets=targets)) < 0.85 * lost(Rtn("W3A16_G128", targets=targets))


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="nearest"):
        Awq("W4")
    with pytest.raises(CompressorError, match="NaN"):
        awq_quantize(torch.full((2, 32), float("nan")), torch.ones(32), Format.parse("W4A16_G32"))
