"""Small floats against ml_dtypes, bit for bit; NormalFloat against the paper's construction."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError
from compressor.formats.elements import Element
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize
from compressor.formats.weights import ChannelScales, Floats
from compressor.numerics.grids import choose_grid, round_scales, round_to_grid, tensor_scale
from compressor.numerics.nearest import rtn_quantize

ORACLES = {
    "E2M1": ml_dtypes.float4_e2m1fn, "E2M3": ml_dtypes.float6_e2m3fn, "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def element(name: str) -> Element:
    found = Element.parse(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ORACLES)
def test_values_are_those_of_ml_dtypes(name: str) -> None:
    ours = element(name)
    theirs = np.arange(1 << ours.bits, dtype=np.uint8).view(ORACLES[name]).astype(np.float64)
    expected = np.where(np.isfinite(theirs), theirs, np.nan)
    assert np.array_equal(np.array(ours.values), expected, equal_nan=True)
    assert ours.max_value == float(ml_dtypes.finfo(ORACLES[name]).max)


@pytest.mark.parametrize("name", ORACLES)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), st.integers(-12, 3))
def test_rounding_is_that_of_ml_dtypes(name: str, fractions: list[float], exponent: int) -> None:
    ours = element(name)
    x = np.array(fractions, np.float32) * np.float32(ours.max_value * 2.0**exponent)
    x = np.concatenate([x, np.array(ours.values, np.float32)])
    x = np.concatenate([x, (x[:-1] + x[1:]) / 2])  # ties as well
    x = np.clip(
        x[np.isfinite(x)], -ours.max_value, ours.max_value
    )  # beyond, ml_dtypes gives NaN or infinity; ours saturates
    fmt = Format(Floats(ours), ChannelScales())
    codes = round_to_grid(torch.from_numpy(x)[None], torch.ones(1), None, fmt)[0].numpy()
    got = np.array(ours.values)[codes]
    assert np.array_equal(got, x.astype(ORACLES[name]).astype(np.float64))


def test_beyond_the_largest_value_rounding_saturates() -> None:
    for name in (*ORACLES, "NF4", "E1M2", "E3M0", "E2M2"):
        ours = element(name)
        fmt = Format(Floats(ours), ChannelScales())
        codes = round_to_grid(torch.tensor([[1e30, -1e30, 0.0, -0.0]]), torch.ones(1), None, fmt)[0]
        largest, least, zero, other_zero = (ours.values[int(code)] for code in codes)
        assert largest == ours.max_value and least == -ours.max_value and zero == other_zero == 0.0


def test_normal_float_has_the_quantiles_of_the_paper() -> None:
    """Equation 4 of QLoRA with its offset 0.9677083: eight quantiles above zero and seven below."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8)[:-1])
    expected = torch.cat([below, torch.zeros(1), above.flip(0)]) / above.max()
    assert torch.allclose(torch.tensor(element("NF4").values), expected.sort().values, atol=2e-5)


def test_scales_are_those_of_ml_dtypes() -> None:
    wanted = torch.logspace(-6, 2.6, 200)
    mx, nv = Format.parse("MXFP4"), Format.parse("NVFP4")
    assert np.array_equal(round_scales(wanted, nv).numpy(), wanted.numpy().astype(ml_dtypes.float8_e4m3fn).clip(
        np.float32(2.0**-9), None).astype(np.float32))  # fmt: skip
    assert float(round_scales(torch.tensor([1e4]), nv)) == 448
    exponents = np.floor(np.log2(wanted.double().numpy()))
    assert np.array_equal(round_scales(wanted, mx).numpy(), np.exp2(exponents).astype(np.float32))
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * 100
    scales, _ = choose_grid(weight, mx)
    shared = torch.floor(torch.log2(weight.abs().amax(1))) - 2  # section 6.3: the largest exponent of E2M1 is 2
    assert torch.equal(scales, torch.exp2(shared))
    unit = tensor_scale(weight, nv)
    assert unit is not None and math.isclose(float(weight.abs().max() / unit), 6 * 448, rel_tol=1e-6)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.element is not None])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 10.0])
def test_adversarial_weights_stay_finite(name: str, size: float) -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse(name)
    weight = torch.randn(5, 70, generator=rng) * size
    weight[0] = 0.0
    weight[1, 3] = 1e3 * size
    values = dequantize(rtn_quantize(weight, fmt))
    assert bool(torch.isfinite(values).all()) and not bool(values[0].any())
    most = 0.5 + 2.0**-20 if size > 1e-20 else 1.0  # smaller than any scale: zeros
    assert float((values - weight).abs().max()) <= float(weight.abs().max()) * most
    weight[2, 2] = float("nan")
    with pytest.raises(CompressorError, match="NaN"):
        rtn_quantize(weight, fmt)
