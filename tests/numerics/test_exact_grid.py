"""Grids are found again from the values that they gave, bit for bit, and only where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize
from compressor.numerics.exact_grid import exact_grid, has_exact_grids
from compressor.numerics.nearest import rtn_quantize

EXACT = sorted(name for name, fmt in FORMATS.items() if has_exact_grids(fmt) and fmt.activations is None)


def test_formats_whose_grids_can_be_found() -> None:
    kinds = {"W2A16_G32", "W4A16_ASYM_G128", "W8A16", "FP8_E4M3", "FP6_E3M2_G128", "MXFP4"}
    assert kinds <= set(EXACT)
    assert not {"NVFP4", "NF4_G64", "LUT3", "BIP2A8_G128"} & set(EXACT)


@given(
    name=st.sampled_from(EXACT),
    rows=st.integers(1, 40),
    columns=st.integers(1, 80),
    size=st.sampled_from([1e-3, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_values_of_any_format_are_kept_bit_for_bit(name: str, rows: int, columns: int, size: float, seed: int) -> None:
    fmt, random = Format.parse(name), torch.Generator().manual_seed(seed)
    weight = size * torch.randn(rows, columns, generator=random)
    weight[torch.rand(rows, columns, generator=random) < 0.3] = 0
    values = dequantize(rtn_quantize(weight, fmt))
    if name.startswith("W") and "ASYM" not in name and fmt.strategy in ("channel", "group"):
        values = values * torch.where(torch.rand(rows, 1, generator=random) < 0.5, 1.0, -1.0)  # negative scales

    def choose(group: torch.Tensor, _columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        grid = exact_grid(group, fmt)
        assert grid is not None
        return grid

    assert torch.equal(dequantize(rtn_quantize(values, fmt, choose)), values)


@pytest.mark.parametrize("name", ["W4A16_G32", "W4A16_ASYM_G32", "W8A16", "FP8_E4M3", "MXFP4"])
def test_other_weights_lie_on_no_grid(name: str) -> None:
    fmt, random = Format.parse(name), torch.Generator().manual_seed(1)
    values = dequantize(rtn_quantize(torch.randn(8, 32, generator=random), fmt))
    assert exact_grid(values, fmt) is not None
    values[3, 5] = torch.nextafter(values[3, 5], torch.tensor(9.0))  # one bit in one weight
    assert exact_grid(values, fmt) is None
    assert exact_grid(torch.full((2, 4), float("nan")), fmt) is None
    assert exact_grid(torch.full((2, 4), float("inf")), fmt) is None
    assert exact_grid(torch.full((2, 4), 1e30), Format.parse("W8A16")) is None  # a scale that float16 cannot hold
