"""GPTQ of depthwise weights: against the pass's own on each channel as a linear of one row, and against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compressor.formats.format import Format
from compressor.formats.packing import dequantize, unpack
from compressor.numerics.channels.obs import match_dense_channels, quantize_channels
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import match_dense
from compressor.passes.gptq import gptq_quantize


def problem(channels: int, taps: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, Hessian of neighbouring inputs that are alike, and a cross term."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(channels, 200, taps, generator=rng)
    x = x + 2 * torch.randn(channels, 200, 1, generator=rng) * torch.rand(channels, 1, 1, generator=rng)
    dense = x + 0.1 * torch.randn(x.shape, generator=rng)
    return torch.randn(channels, taps, generator=rng), x.mT @ x / 100, (dense - x).mT @ x / 100


@pytest.mark.parametrize("name", ["W4A16_C", "W3A16_ASYM_C", "W8A8_STATIC", "W4A16_G32"])
@pytest.mark.parametrize("actorder", [True, False])
def test_each_channel_is_a_linear_of_one_row(name: str, actorder: bool) -> None:
    weight, hessian, _ = problem(6, 9)
    hessian[4, 2], hessian[4, :, 2] = 0.0, 0.0  # a tap that reads zeros
    fmt = Format.parse(name)
    packed, info = quantize_channels(weight, hessian, fmt, actorder=actorder, dampening_frac=0.01, observer="minmax")
    codes, losses = unpack(packed)[0], []
    for c in range(6):
        row = (weight[c : c + 1], hessian[c], fmt)
        alone, _ = gptq_quantize(*row, actorder=actorder, static_groups=True, observer="minmax")
        assert torch.equal(unpack(alone)[0][0], codes[c]), c
        d = (weight[c] - dequantize(packed)[c]).double()
        losses.append(float(d @ hessian[c].double() @ d))
    norm = sum(float(w @ H @ w) for w, H in zip(weight.double(), hessian.double(), strict=True))
    assert info.error == pytest.approx(sum(losses) / norm, rel=1e-9) and info.error <= info.rtn_error
    assert info.dead_taps == 1


def test_nearly_the_best_of_all_codes() -> None:
    """Of three taps, all codes of W2 on the same grid can be tried."""
    weight, hessian, _ = problem(40, 3, seed=1)
    fmt = Format.parse("W2A16_C")
    _, info = quantize_channels(weight, hessian, fmt, actorder=True, dampening_frac=0.001, observer="minmax")
    _, scales, _ = unpack(rtn_quantize(weight, fmt))
    tried = torch.tensor(list(itertools.product(range(4), repeat=3))) - fmt.zero_point
    d = weight[:, None].double() - scales[:, :1, None].double() * tried
    best = torch.einsum("cnt,cts,cns->cn", d, hessian.double(), d).amin(1).sum()
    norm = torch.einsum("ct,cts,cs->", weight.double(), hessian.double(), weight.double())
    assert float(best / norm) <= info.error * (1 + 1e-9)
    assert info.error - float(best / norm) < 0.35 * (info.rtn_error - float(best / norm))


def test_correction_for_changed_inputs() -> None:
    weight, hessian, cross = problem(5, 9)
    got = match_dense_channels(weight, hessian, cross)
    for c in range(5):
        expected = match_dense(weight[c : c + 1], hessian[c], cross[c])
        torch.testing.assert_close(got[c : c + 1], expected, rtol=1e-5, atol=1e-6)
