"""Codes column by column: exact round trips, counted bytes, panels that waste little, what cannot be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import random_packed

from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize, skip_inputs, unpack
from compressor.formats.parts import panel_rows


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["W8A16", "W4A16_G32", "W8A16_G64", "W4A16_T"]),
    st.integers(1, 700),
    st.integers(1, 90),
    st.integers(0, 2**31),
)
def test_a_weight_stays_what_it_was(name: str, rows: int, columns: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    packed, limits = random_packed(Format.parse(name), rows, columns, rng), torch.rand(columns, generator=rng)
    found = skip_inputs(packed, limits)
    assert found.format.name == f"{packed.format.name}_SKIP" and Format.parse(found.format.name) == found.format
    assert found.nbytes == found.format.packed_bytes(rows, columns)
    assert torch.equal(dequantize(found), dequantize(packed)) and torch.equal(found.parts["thresholds"], limits)


def test_bytes_lie_as_documented() -> None:
    rng = torch.Generator().manual_seed(1)
    for name, unit in (("W8A16", 16), ("W4A16_G32", 32)):
        packed = random_packed(Format.parse(name), 600, 40, rng)
        stored, (codes, _, _) = skip_inputs(packed, torch.zeros(40)).parts["codes"], unpack(packed)
        rows = panel_rows(600, packed.format.bits)
        for row, column in ((0, 0), (17, 3), (599, 39), (300, 20)):
            place = stored[row // rows, column, row % rows // unit * 16 + row % 16]
            value = int(place) ^ 0x80 if unit == 16 else int(place) >> (4 if row % rows % 32 >= 16 else 0) & 15
            assert value == int(codes[row, column])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [16, 256, 288, 896, 1000, 4096, 4864, 11008])
def test_panels_waste_little_and_share_work(rows: int, bits: int) -> None:
    panel, unit = panel_rows(rows, bits), 128 // bits
    panels = -(-rows // panel)
    assert (panel % unit == 0 and panel * bits // 8 <= 2048 and panels > 1) or rows <= 16
    assert panels * panel < rows + 2 * unit


@pytest.mark.parametrize(("name", "what"), [
    ("W8A8_SKIP", "A16"), ("W4A16_ASYM_SKIP", "symmetric integers"), ("W3A16_SKIP", "4 or 8 bits"),
    ("NF4_SKIP", "symmetric integers"), ("BIP4A16_SKIP", "symmetric integers"), ("W8A16_B128_SKIP", "scales of groups"),
    ("W8A16_S1_SKIP", "no other extra"), ("W8A16_B16x1@50_SKIP", "cannot have"),
])  # fmt: skip
def test_formats_that_skip_nothing(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Format.parse(name)
