"""What is stored as floats beside the codes: exact sums, counted bytes, ragged shapes, bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.outliers import add_columns, add_outliers, largest
from compressor.formats.packing import PackedWeight, coded_rows, dequantize, dequantize_rows
from compressor.numerics.nearest import rtn_quantize
from compressor.ops.linear import packed_product
from compressor.pipeline.sites import choose_format


def codes_only(packed: PackedWeight) -> torch.Tensor:
    return torch.cat([values for _, values in coded_rows(packed)])


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["LUT3", "W4A16_G32", "W3A8_C", "MXFP4", "NVFP4", "W2A16_ASYM_G32"]), st.integers(1, 40),
    st.integers(1, 90), st.sampled_from([0.05, 0.5, 3.0, 10.0]), st.integers(0, 3), st.integers(0, 2**31),
)  # fmt: skip
def test_a_weight_is_its_codes_and_its_floats(
    name: str, rows: int, columns: int, percent: float, whole: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight, fmt = torch.randn(rows, columns, generator=rng), Format.parse(name)
    kept = (
        torch.randperm(columns, generator=rng)[: whole if fmt.element is None and not fmt.codebook else 0].sort().values
    )
    plain = rtn_quantize(weight.index_fill(1, kept, 0.0), fmt)
    packed = add_columns(plain, weight, kept)
    wanted = Format.parse(f"{fmt.name}_S{percent:g}")
    where = largest(torch.rand(rows, columns, generator=rng), wanted.outliers(rows, columns))
    packed = add_outliers(packed, weight.index_fill(1, kept, 0.0), where.index_fill(1, kept, False) | where, percent)
    assert packed.nbytes == packed.format.packed_bytes(rows, columns)
    assert Format.parse(packed.format.name) == packed.format
    assert list(packed.parts) == list(packed.format.parts(rows, columns))
    expected = codes_only(plain)
    expected[:, kept] += weight[:, kept].half().float()
    expected[where] += (weight.index_fill(1, kept, 0.0) - codes_only(plain))[where].half().float()
    got = dequantize(packed)
    assert torch.equal(torch.cat([values for _, values in dequantize_rows(packed)]), got)
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)
    assert bool(((got - weight)[where].abs() <= weight.abs()[where] * 2.0**-10 + 1e-3).all())


def test_rounding_a_format_with_outliers_keeps_the_largest() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight[3, 7], weight[20, 200] = 50.0, -70.0
    plain, packed = (rtn_quantize(weight, Format.parse(name)) for name in ("W3A16_C", "W3A16_C_S0.1"))
    assert packed.format.outliers(32, 256) == 8
    assert packed.nbytes - plain.nbytes == 8 * 4 + 33 * 4
    lost = [float((dequantize(p) - weight).square().sum()) for p in (plain, packed)]
    assert lost[1] < 0.5 * lost[0]
    assert float((dequantize(packed) - weight)[[3, 20], [7, 200]].abs().max()) < 0.02


def test_int8_activations_bypass_what_is_stored_as_floats() -> None:
    """The definition, in float64: columns that are kept take no part in the activations' scale."""
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(9, 40, generator=rng), torch.randn(5, 40, generator=rng)
    x[:, 11] *= 1000
    packed = add_columns(rtn_quantize(weight.index_fill(1, torch.tensor([11]), 0.0), Format.parse("W8A8")), weight,
                         torch.tensor([11]))  # fmt: skip
    rest = x.double().index_fill(1, torch.tensor([11]), 0.0)
    step = rest.abs().amax(1, keepdim=True) / 127
    expected = torch.round(rest / step) * step @ codes_only(packed).double().T
    expected += x[:, 11, None].double() * weight[:, 11].half().double()
    torch.testing.assert_close(packed_product(x.double(), packed), expected, rtol=1e-12, atol=1e-9)
    error = [float((y.double() - x.double() @ weight.double().T).norm()) for y in (
        packed_product(x, packed), packed_product(x, rtn_quantize(weight, Format.parse("W8A8"))))]  # fmt: skip
    assert error[0] < 0.1 * error[1]


def test_bad_input() -> None:
    packed = rtn_quantize(torch.ones(4, 64), Format.parse("W4A16_G32"))
    where = torch.zeros(4, 64, dtype=torch.bool)
    with pytest.raises(ValueError, match="0 outliers"):
        add_outliers(packed, torch.ones(4, 64), where, 1.0)
    with pytest.raises(CompressorError, match="NaN, inf"):
        add_columns(packed, torch.full((4, 64), 1e6), torch.tensor([3]))
    with pytest.raises(UsageError, match="llm_int8"):
        choose_format("W8A8_F8")
    assert Format.parse("w4a16_g32_s0.5").outlier_percent == 0.5
