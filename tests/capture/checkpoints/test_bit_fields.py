"""Codes in words against an arbitrary-precision integer, and bytes worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import FP4, bit_stream, whole_codes

from compressor.capture.checkpoints.bit_fields import e8m0_scales, spread, unpack_fp4, unpack_words, word_count

any_codes = st.integers(1, 8).flatmap(
    lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=80))
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(any_codes)
def test_packed_codes_come_back(given: tuple[int, list[int]]) -> None:
    bits, codes = given
    for pack, dense in ((bit_stream, True), (whole_codes, False)):
        words = pack(codes, bits)
        assert len(words) == word_count(len(codes), bits, dense)
        found = unpack_words(torch.tensor([words, words], dtype=torch.int32), bits, len(codes), dense)
        assert found.dtype == torch.uint8 and found.tolist() == [codes, codes]


def test_words_by_hand() -> None:
    assert unpack_words(torch.tensor([0x76543210], dtype=torch.int32), 4, 8).tolist() == [*range(8)]
    # 3 bits: code 10 has its low two bits at the end of word 0 and its high bit at the beginning of word 1.
    words = torch.tensor([-(2**31), 0b1], dtype=torch.int32)
    assert unpack_words(words, 3, 12).tolist() == [0] * 10 + [0b110, 0]
    assert unpack_words(words, 3, 12, dense=False).tolist() == [0] * 10 + [1, 0]


def test_fp4_low_nibble_first() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = [[FP4[byte & 15], FP4[byte >> 4]] for byte in range(256)]
    found = unpack_fp4(every[:, None])
    assert found.tolist() == expected and found.dtype == torch.float32
    assert unpack_fp4(torch.tensor([0x72], dtype=torch.uint8)).tolist() == [1.0, 6.0]


def test_e8m0_is_a_power_of_two() -> None:
    found = e8m0_scales(torch.arange(256, dtype=torch.uint8)).numpy()
    assert found[:255].astype(np.float64).tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(found[255]) and found[127] == 1 and found[0] == 2.0**-127


@pytest.mark.parametrize("block", [(1, 5), (4, 5), (2, 2), (3, 4), (1, 2), (128, 128), (128, 1)])
def test_scales_are_spread_over_their_blocks(block: tuple[int, int]) -> None:
    shape = (4, 5)
    sizes = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    scales = torch.arange(sizes[0] * sizes[1], dtype=torch.bfloat16).reshape(sizes)
    expected = [[float(scales[o // block[0], i // block[1]]) for i in range(5)] for o in range(4)]
    assert spread(scales, block, shape).tolist() == expected
