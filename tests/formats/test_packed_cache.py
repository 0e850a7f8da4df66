"""Cache formats: exact round trips, the documented layout, plain definitions, and ml_dtypes for E4M3."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UsageError
from compressor.formats.cache import CACHE_FORMATS, DENSE_CACHE, CacheFormat, cache_bytes_per_token, cache_row
from compressor.formats.layouts.packed_cache import dequantize_cache, pack_cache, quantize_cache, unpack_cache

NAMES = sorted({*CACHE_FORMATS, "INT4", "INT8_G32", "INT4_G8", "FP8_E4M3_G16", "BFP4_G8", "BFP8_G256"})
ADVERSARIAL = (0.0, -0.0, 1e-45, 1e-30, 1e-8, 6.0e-8, 0.5, 1.0, -1.0, 447.9, 464.0, 1e4, 3e38, -3.4e38)
formats = st.sampled_from(NAMES).map(CacheFormat.parse)
rows = st.lists(st.floats(-100, 100, width=32) | st.sampled_from(ADVERSARIAL), min_size=1, max_size=70)


def plain_row(x: list[float], fmt: CacheFormat) -> list[float]:
    """Read a row by the definition, number by number in float64."""
    result: list[float] = []
    span = fmt.group_size or len(x)
    for first in range(0, len(x), span):
        group = x[first : first + span]
        top = max(map(abs, group))
        if fmt.scale_type == "E8M0":
            scale = 2.0 ** max(math.frexp(top)[1] - 1 - (fmt.bits - 2), -126) if top else 1.0
        else:
            scale = float(np.float16(min(np.float32(top) / np.float32(fmt.max_value), 65504.0)))
        for value in group:
            quotient = float(np.float32(value) / np.float32(scale)) if scale else 0.0
            kept = min(max(quotient, -fmt.max_value), fmt.max_value)
            code = float(kept.__round__()) if fmt.element is None else float(ml_dtypes.float8_e4m3fn(kept))
            result.append(code * scale)
    return result


@settings(deadline=None, max_examples=150)
@given(formats, rows)
def test_rounding_is_the_plain_definition(fmt: CacheFormat, x: list[float]) -> None:
    codes, scales = quantize_cache(torch.tensor([x]), fmt)
    got = dequantize_cache(pack_cache(codes, scales, fmt), fmt, len(x))
    assert bool(torch.isfinite(got).all())
    assert got[0].tolist() == pytest.approx(plain_row(x, fmt), rel=1e-6, abs=1e-38)


@settings(deadline=None, max_examples=60)
@given(formats, st.integers(1, 80), st.integers(0, 2**31))
def test_packing_is_exact_and_takes_the_bytes_that_are_stated(fmt: CacheFormat, width: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    top = int(fmt.max_value) if fmt.element is None else 126
    codes = torch.randint(-top, top + 1, (2, 3, width), generator=rng, dtype=torch.int8)
    bits = torch.randint(0, 256, (2, 3, fmt.groups(width), 2), generator=rng, dtype=torch.uint8)
    halves = (bits[..., 0].int() | bits[..., 1].int() << 8).to(torch.int16).view(torch.float16)
    scales = bits[..., 0] if fmt.scale_type == "E8M0" else torch.where(torch.isfinite(halves), halves, 1.0)
    packed = pack_cache(codes, scales, fmt)
    assert packed.dtype is torch.uint8 and packed.shape == (2, 3, fmt.row_bytes(width))
    got_codes, got_scales = unpack_cache(packed, fmt, width)
    assert torch.equal(got_codes, codes) and torch.equal(got_scales, scales)


def test_the_layout_is_the_documented_one() -> None:
    int4 = CacheFormat.parse("INT4_G8")
    packed = pack_cache(torch.tensor([[1, -2, 7, -7, 3]], dtype=torch.int8), torch.tensor([[1.0]]).half(), int4)
    assert packed.tolist() == [[0x91, 0x3E, 0x07, 0x00, 0x3C]]  # channels 0 and 3, 1 and 4, 2; 1.0 is 0x3C00
    bfp8 = CacheFormat.parse("BFP8_G8")
    x = torch.tensor([[1.0] * 8 + [-3.0, 0.5]])
    packed = pack_cache(*quantize_cache(x, bfp8), bfp8)
    assert packed.tolist() == [[64] * 8 + [256 - 96, 16] + [127 - 6, 128 - 6]]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_reads_as_no_number(name: str) -> None:
    """The whole group does, so that no later sum looks sound; other groups and rows are as they were."""
    fmt, x = CacheFormat.parse(name), torch.ones(3, 64)
    x[0, 3], x[1, 5] = math.nan, math.inf
    got = dequantize_cache(pack_cache(*quantize_cache(x, fmt), fmt), fmt, 64)
    span = fmt.span(64)
    assert not bool(torch.isfinite(got[:2, :span]).any())
    assert bool(torch.isfinite(got[:2, span:]).all()) and bool(torch.isfinite(got[2]).all())


def test_names() -> None:
    for name in NAMES:
        fmt = CacheFormat.parse(name)
        assert CacheFormat.parse(fmt.name) == fmt == CacheFormat.parse(f" {fmt.name.lower()} ")
    short = {"INT4": "INT4_G32", "BFP8": "BFP8_G16", "FP8": "FP8_E4M3", "INT8": "INT8"}
    assert {name: CacheFormat.parse(name).name for name in short} == short
    for wrong in ("INT3", "W4A16", "INT8_G0_G8", "BFP8_G24", "FP8_E5M2", "FP32", ""):
        with pytest.raises(UsageError, match=r"nearest: |there are: 8, 16"):
            CacheFormat.parse(wrong)


def test_bytes_of_the_formats() -> None:
    assert cache_row(DENSE_CACHE, 64) == ("float32", 64)
    expected = {DENSE_CACHE: 256, "INT8": 66, "INT4": 36, "FP8": 66, "BFP8_G16": 68, "BFP4_G32": 34}
    for name, size in expected.items():
        assert cache_bytes_per_token(name, [4] * 5, 64) == 2 * 5 * 4 * size
