"""N of every M weights: numbers of groups, exact round trips, counted bytes, what cannot be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import random_packed

from compressor.errors import UsageError
from compressor.formats.extras import KeptOfGroup
from compressor.formats.format import Format
from compressor.formats.layouts.patterns import from_numbers, pack_numbers, to_numbers, unpack_numbers
from compressor.formats.packing import dequantize, kept_part, kept_places

PATTERNS = ["2:4", "1:4", "3:4", "1:2", "4:8", "2:8", "1:16", "2:3", "5:10"]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PATTERNS), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_numbers_are_those_of_the_documented_layout(name: str, rows: int, groups: int, seed: int) -> None:
    pattern, rng = KeptOfGroup(*map(int, name.split(":"))), torch.Generator().manual_seed(seed)
    places = torch.rand(rows, groups, pattern.size, generator=rng).argsort(dim=-1)
    where = (places < pattern.kept).flatten(1)
    numbers, bits = to_numbers(where, pattern), math.ceil(math.log2(math.comb(pattern.size, pattern.kept)))
    assert bits == pattern.index_bits
    known = list(itertools.combinations(range(pattern.size), pattern.kept))
    row, group = rows - 1, groups // 2
    first = where[row, group * pattern.size : (group + 1) * pattern.size]
    assert known[int(numbers[row, group])] == tuple(first.nonzero().flatten().tolist())
    words = pack_numbers(numbers, bits)
    assert words.shape == (-(-rows // 16), -(-groups * bits // 32), 16)
    stream = "".join(f"{int(word) & 0xFFFFFFFF:032b}"[::-1] for word in words[row // 16, :, row % 16])
    assert int(stream[group * bits : (group + 1) * bits][::-1], 2) == int(numbers[row, group])
    assert torch.equal(unpack_numbers(words, bits, rows, groups), numbers)
    assert torch.equal(from_numbers(numbers, pattern), where.nonzero()[:, 1].view(rows, -1))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["W8A16", "W4A16_C", "W8A16_G64"]), st.sampled_from(["2:4", "1:4", "4:8", "1:2"]),
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31),
)  # fmt: skip
def test_what_is_left_out_is_zero_and_the_rest_exact(
    codes: str, pattern: str, rows: int, groups: int, seed: int
) -> None:
    fmt, rng = Format.parse(f"{codes}_{pattern}"), torch.Generator().manual_seed(seed)
    columns = groups * int(pattern.split(":")[1])
    packed = random_packed(fmt, rows, columns, rng)
    assert Format.parse(fmt.name) == fmt and packed.nbytes == fmt.packed_bytes(rows, columns)
    expected = torch.zeros(rows, columns)
    for row, places in enumerate(kept_places(packed)):
        expected[row, places] = dequantize(kept_part(packed))[row]
    assert torch.equal(dequantize(packed), expected)


def test_bits_of_a_large_weight() -> None:
    bits = Format.parse("W8A16_2:4").packed_bytes(4096, 4096) * 8 / 4096**2
    assert bits == 4 + 3 / 4 + 16 / 4096
    assert Format.parse("W4A16_G128_2:4").packed_bytes(4096, 4096) * 8 / 4096**2 == 2 + 3 / 4 + 16 / 256


@pytest.mark.parametrize(("name", "what"), [
    ("W8A16_4:4", "fewer than all"), ("W8A16_5:4", "keeps 5 of every 4"), ("W8A16_0:4", "keep at least 1"),
    ("W8A16_8:16", "at most 16 weights and 256 choices"), ("W8A16_2:32", "at most 16"),
    ("W8A8_2:4", "A16"), ("W4A16_ASYM_2:4", "symmetric integers"), ("W3A16_2:4", "4 or 8 bits"),
    ("NF4_2:4", "symmetric integers"), ("W8A16_B128_2:4", "scales of groups or channels"),
    ("W4A16_G32_3:4", "cut groups of 3 apart"), ("W8A16_B16x1@50_2:4", "cannot have"), ("W8A16_2:4_SKIP", "no other"),
])  # fmt: skip
def test_what_cannot_be(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Format.parse(name)


def test_rows_that_are_no_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="2:4: rows of 30 weights do not divide into groups of 4"):
        Format.parse("W8A16_2:4").packed_bytes(16, 30)
