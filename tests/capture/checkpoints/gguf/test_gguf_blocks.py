"""Blocks of GGUF against the element-by-element reference, the official package, and bytes worked out by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf_files import TYPES, block_values, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.capture.checkpoints.gguf.gguf_blocks import BLOCK_TYPES


def dequantized(kind: str, raw: np.ndarray) -> np.ndarray:
    return BLOCK_TYPES[kind].dequantize(torch.from_numpy(raw.copy())).numpy()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_those_of_the_reference(kind: str) -> None:
    raw = random_blocks(np.random.default_rng(1), kind, 40)
    expected = np.array([block_values(kind, block.tobytes()) for block in raw])
    found = dequantized(kind, raw)
    assert found.dtype == np.float32 and found.shape == (40, TYPES[kind][1])
    # The reference's products and sums are exact in float64, so this is the nearest float32: one rounding.
    assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K"])
def test_types_without_minima_are_exact(kind: str) -> None:
    raw = random_blocks(np.random.default_rng(2), kind, 40)
    expected = np.array([block_values(kind, block.tobytes()) for block in raw])
    assert np.array_equal(dequantized(kind, raw).astype(np.float64), expected)


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - {"Q2_0"}))  # which gguf 0.19 does not know
def test_values_are_those_of_the_official_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    assert (number.value, *gguf.GGML_QUANT_SIZES[number]) == TYPES[kind]
    raw = random_blocks(np.random.default_rng(3), kind, 200)
    assert np.array_equal(dequantized(kind, raw), gguf.quants.dequantize(raw, number))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(BLOCK_TYPES)), data=st.data())
def test_any_bytes(kind: str, data: st.DataObject) -> None:
    """Infinite and NaN scales too: they come out as such, and never end the process."""
    block = data.draw(st.binary(min_size=TYPES[kind][2], max_size=TYPES[kind][2]))
    with np.errstate(all="ignore"):
        expected = np.array(block_values(kind, block)).astype(np.float32)
    found = dequantized(kind, np.frombuffer(block, np.uint8)[None])[0]
    finite = np.isfinite(expected)
    assert np.array_equal(found[finite], expected[finite]) and np.array_equal(np.isfinite(found), finite)


def test_a_block_of_q4_0_by_hand() -> None:
    # d = -0.5; byte 0 is 0xF0: element 0 is code 0, element 16 is code 15.  The others are 8: zero.
    block = struct.pack("<e", -0.5) + bytes([0xF0]) + bytes([0x88] * 15)
    values = dequantized("Q4_0", np.frombuffer(block, np.uint8)[None])[0]
    assert values[0] == 4.0 and values[16] == -3.5 and not values[1:16].any() and not values[17:].any()


def test_a_block_of_q4_k_by_hand() -> None:
    # Sub-block 5's scale is 0b110010 (low nibble of byte 9, high bits of byte 1) and its minimum 0b010011.
    scales = bytearray(12)
    scales[9] = 0b0011_0010
    scales[1] = 0b11_000000
    scales[5] = 0b01_000000
    codes = bytearray(128)
    codes[64 + 7] = 0xA0  # the high nibble of byte 7 of the third 32: element 7 of sub-block 5
    block = struct.pack("<ee", 0.25, 2.0) + bytes(scales) + bytes(codes)
    values = dequantized("Q4_K", np.frombuffer(block, np.uint8)[None])[0].reshape(8, 32)
    assert values[5, 7] == 0.25 * 50 * 10 - 2 * 19
    assert (np.delete(values[5], 7) == -2 * 19).all() and not np.delete(values, 5, 0).any()
