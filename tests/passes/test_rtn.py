"""Round to nearest against a plain definition, and the pass on a tiny model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize, unpack
from compressor.formats.weights import ChannelScales, GroupScales, Integers, Scales, TensorScale
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.rtn import Rtn


@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    scales=st.sampled_from([TensorScale(), ChannelScales(), GroupScales(32)]),
    columns=st.integers(1, 80),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_every_weight_goes_to_the_nearest_point_of_its_grid(
    bits: int, symmetric: bool, scales: Scales, columns: int, seed: int
) -> None:
    fmt = Format(Integers(bits, symmetric), scales)
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(seed))
    packed = rtn_quantize(weight, fmt)
    _, scales, zeros = unpack(packed)
    values = dequantize(packed)
    codes = torch.arange(fmt.levels, dtype=torch.float32)
    for row in range(5):
        for column in range(columns):
            group = column // fmt.columns(columns)
            zero = fmt.zero_point if zeros is None else zeros[row, group].float()
            grid = (codes - zero) * scales[row, group].float()
            nearest = (grid - weight[row, column]).abs().min()
            assert (values[row, column] - weight[row, column]).abs() <= nearest + 1e-6


def test_not_a_number_is_refused() -> None:
    with pytest.raises(CompressorError, match="NaN"):
        rtn_quantize(torch.full((2, 32), float("nan")), Format.parse("W4A16_G32"))


def test_options_are_checked_when_the_pass_is_made() -> None:
    with pytest.raises(UsageError, match="nearest"):
        Rtn(scheme="W4G32")
    with pytest.raises(UsageError, match="multiple"):
        Rtn(scheme="W4A16_G32", group_size=20)
