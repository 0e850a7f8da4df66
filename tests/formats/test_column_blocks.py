"""Blocks of 16 rows by one column: bits, exact round trips, counted bytes, what cannot be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import random_packed

from compressor.errors import UsageError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.layouts.columns import from_bits, of_blocks, to_bits
from compressor.formats.packing import dequantize, kept_part, leave_out

NAMES = ["W8A8_B16x1@80", "W4A16_G32_B16x1@50", "W3A8_ASYM_G64_B16x1@12.5", "NF4_G64_B16x1@99", "LUT3_B16x1@70"]
NAMES += ["W8A8_STATIC_B32x4@30", "W4A8_C_STATIC_B32x4@75", "W8A8_B32x64@50", "W3A16_ASYM_G64_B32x64@60"]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 300), st.floats(0.01, 1), st.integers(0, 2**31))
def test_bits_say_which_columns(tiles: int, columns: int, share: float, seed: int) -> None:
    rng, kept = torch.Generator().manual_seed(seed), max(1, round(share * columns))
    chosen = torch.rand(tiles, columns, generator=rng).argsort(dim=1)[:, :kept].sort(dim=1).values
    bits = to_bits(chosen, columns)
    assert bits.shape == (tiles, -(-columns // 64) * 8)
    for tile, row in enumerate(chosen.tolist()):  # as the layout is documented
        assert [c for c in range(columns) if bits[tile, c // 8] >> (c % 8) & 1] == row
    assert torch.equal(from_bits(bits, kept), chosen)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 50), st.integers(1, 260), st.integers(0, 2**31))
def test_what_is_left_out_is_zero_and_the_rest_exact(name: str, rows: int, columns: int, seed: int) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(seed)
    packed = random_packed(fmt, rows, columns, rng)
    assert Format.parse(fmt.name.upper()) == fmt and packed.nbytes == fmt.packed_bytes(rows, columns)
    blocks = fmt.extra(ColumnBlocks)
    assert blocks is not None
    kept = from_bits(packed.parts["kept"], fmt.stored_columns(columns), blocks.width)
    kept = kept.repeat_interleave(blocks.tiles, dim=0)
    assert kept.shape[1] == fmt.stored_columns(columns)
    dense, values = dequantize(packed), dequantize(kept_part(packed))
    expected = torch.zeros(rows, columns + 63)  # what fills up the last block is dropped
    for row in range(rows):
        expected[row, kept[row // 16]] = values[row]
    assert torch.equal(dense, expected[:, :columns])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 300), st.floats(0.01, 1), st.integers(0, 2**31))
def test_a_bit_for_each_block_of_four(tiles: int, columns: int, share: float, seed: int) -> None:
    rng, blocks = torch.Generator().manual_seed(seed), -(-columns // 4)
    chosen = torch.rand(tiles, blocks, generator=rng).argsort(dim=1)[:, : max(1, round(share * blocks))].sort(1).values
    bits, wide = to_bits(of_blocks(chosen, 4), columns, 4), of_blocks(chosen, 4)
    assert torch.equal(bits, to_bits(chosen, blocks)) and torch.equal(from_bits(bits, wide.shape[1], 4), wide)
    assert wide[0, :4].tolist() == [4 * int(chosen[0, 0]) + i for i in range(4)]
    with pytest.raises(ValueError, match="whole blocks"):
        to_bits(wide + 1, columns + 1, 4)


@pytest.mark.parametrize(
    ("percent", "columns", "kept"), [(80, 100, 20), (80, 7, 4), (99, 64, 4), (50, 3, 3), (1, 8, 8)]
)
def test_as_many_columns_are_kept_as_fill_chunks(percent: float, columns: int, kept: int) -> None:
    assert Format.parse(f"W8A8_B16x1@{percent}").stored_columns(columns) == kept


def test_bytes_of_a_large_weight() -> None:
    bits = Format.parse("W8A8_B16x1@80").packed_bytes(4096, 4096) * 8 / 4096**2
    assert bits == pytest.approx(820 / 4096 * 8 + 1 / 16 + 16 / 4096)


@pytest.mark.parametrize(("name", "what"), [
    ("W8A8_B32_B16x1@50", "scales of blocks"), ("W8A8_T_B16x1@50", "of the tensor"), ("BIP2A8_B16x1@50", "bit planes"),
    ("W4A4_G128_AG128_B16x1@50", "activations in groups"), ("W4A16_S1_B16x1@50", "floats beside"),
    ("W8A8_B32x4@50", "is of convolutions"), ("W8A16_B32x4@50", "is of convolutions"), ("W8A8_B16x2@50", "unknown"),
    ("W8A8_G32_STATIC_B32x4@50", "scales of groups"), ("W8A1_STATIC_B32x4@50", "is of convolutions"),
    ("NVFP4_B16x1@50", "E4M3 scales"), ("W8A8_B16x1@0", "more than 0"),
])  # fmt: skip
def test_what_does_not_go_together(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Format.parse(name)


def test_as_many_columns_as_the_format_keeps() -> None:
    fmt = Format.parse("W8A8_B16x1@50")
    part = random_packed(fmt.of_kept, 20, 12, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="does not keep"):
        leave_out(part, torch.arange(12).expand(2, 12), 40, ColumnBlocks(50))
