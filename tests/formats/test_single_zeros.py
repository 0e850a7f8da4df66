"""Single weights left out: exact round trips of random masks, the documented layout, counted bytes, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import random_packed

from compressor.errors import UsageError
from compressor.formats.extras import SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import dequantize, filled_up, kept_singles, leave_out_singles, unpack
from compressor.passes.sparse_train import SparseTrain

FORMATS = [
    "W8A16",
    "W4A16_G32",
    "W3A16_ASYM_G64",
    "W6A8",
    "W4A16_ASYM_B32",
    "NVFP4",
    "FP6_E2M3_G32",
    "W2A16_ASYM",
    "NF4_G64",
]


def random_mask(rows: int, columns: int, count: int, seed: int) -> torch.Tensor:
    """Return a mask with so many ones, in one piece for every third seed: then tiles are empty and full."""
    places, kept = torch.arange(rows * columns), torch.zeros(rows * columns, dtype=torch.bool)
    if seed % 3:
        places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
    kept[places[:count]] = True
    return kept.view(rows, columns)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FORMATS), st.integers(1, 50), st.integers(1, 200), st.sampled_from([1.0, 50.0, 70.25, 99.99]),
    st.integers(0, 2**31),
)  # fmt: skip
@example("W8A16", 1, 1, 99.99, 0)  # at least one is kept
def test_round_trip_of_random_masks(name: str, rows: int, columns: int, percent: float, seed: int) -> None:
    single, rng = SingleZeros(percent), torch.Generator().manual_seed(seed)
    dense = random_packed(Format.parse(name), rows, columns, rng)
    kept = random_mask(rows, columns, single.kept(rows, columns), seed)
    packed = leave_out_singles(dense, kept, single)
    assert packed.format == Format.parse(f"{name}_B1x1@{percent:g}") == Format.parse(packed.format.name)
    assert packed.nbytes == packed.format.packed_bytes(rows, columns)
    assert torch.equal(kept_singles(packed), kept)
    assert torch.equal(unpack(filled_up(packed))[0][kept], unpack(dense)[0][kept])
    assert torch.equal(dequantize(packed), torch.where(kept, dequantize(dense), 0.0))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["W8A16", "W4A16_G32", "W3A16", "W6A16"]), st.integers(0, 2**31))
def test_bits_are_those_of_the_documented_layout(name: str, seed: int) -> None:
    """Code after code is read out of the stream by the layout's words alone."""
    rows, columns, single, fmt = 37, 150, SingleZeros(60), Format.parse(name)
    dense = random_packed(fmt, rows, columns, torch.Generator().manual_seed(seed))
    kept = random_mask(rows, columns, single.kept(rows, columns), seed)
    packed, codes, rank = leave_out_singles(dense, kept, single), unpack(dense)[0], 0
    stream = packed.parts["codes"].tolist()
    for tile in range(3):
        assert packed.parts["starts"][tile] == rank
        for step in range(3):
            for r in range(16):
                bits = packed.parts["kept"][tile, step, r].tolist()
                for c in range(64):
                    row, column = 16 * tile + r, 64 * step + c
                    is_kept = row < rows and column < columns and bool(kept[row, column])
                    assert bits[c // 8] >> c % 8 & 1 == is_kept
                    if is_kept:
                        assert stored_code(stream, rank, fmt) == codes[row, column]
                        rank += 1
    assert rank == single.kept(rows, columns)


def stored_code(stream: list[int], rank: int, fmt: Format) -> int:
    """Return the code of that number: plane after plane of blocks of 64."""
    found, offset, first, k = 0, 0, rank // 64 * 8 * fmt.bits, rank % 64
    for p in fmt.planes:
        found |= (stream[first + k % (8 * p)] >> p * (k // (8 * p)) & (1 << p) - 1) << offset
        offset, first = offset + p, first + 8 * p
    return found


def test_bits_of_a_large_weight() -> None:
    bits = Format.parse("W8A16_B1x1@50").packed_bytes(4096, 4096) * 8 / 4096**2
    assert bits == 4 + 1 + 16 / 4096 + (64 * 8 + 256 * 32) / 4096**2  # codes, masks, scales, room at the end, starts
    assert Format.parse("W4A16_G128_B1x1@75").packed_bytes(64, 128) == 64 * 128 // 4 // 2 + 32 + 1024 + 128 + 16


@pytest.mark.parametrize(("name", "what"), [
    ("W8A16_B1x1@0", "0% of the weights are zero; give more than 0, below 100"),
    ("W8A16_B1x1@100", "100% of the weights are zero"), ("W8A16_B1x1@180", "below 100"),
    ("W8A16_B1x1@", "unknown"), ("W8A16_B1x1@0.001", "unknown"),
    ("LUT3_B1x1@50", "codes one of which is zero"), ("BIP2A8_B1x1@50", "codes one of which is zero"),
    ("W8A16_2:4_B1x1@50", "stands with no other"), ("W8A16_B16x1@50_B1x1@50", "cannot have"),
    ("W8A16_B1x1@50_SKIP", "no other"),
])  # fmt: skip
def test_what_cannot_be(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Format.parse(name)


def test_other_counts_are_refused() -> None:
    dense = random_packed(Format.parse("W8A16"), 16, 64, torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="W8A16_B1x1@50 of 16 x 64 does not keep 1024 weights"):
        leave_out_singles(dense, torch.ones(16, 64, dtype=torch.bool), SingleZeros(50))


def test_training_keeps_to_blocks() -> None:
    with pytest.raises(UsageError, match="W8A16_B1x1@80 leaves no blocks out; end it with _B16x1@90"):
        SparseTrain(scheme="W8A16_B1x1@80")
