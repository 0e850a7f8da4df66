"""Formats and packing: exact round trips, counted bytes, the documented layout, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize, pack, unpack
from compressor.formats.planes import TwoPlanes
from compressor.formats.weights import BitPlanes, BlockScales, ChannelScales, GroupScales, Integers, TensorScale
from compressor.numerics.grids import (
    choose_grid,
    grid_values,
    neighbour_codes,
    round_scales,
    round_to_grid,
    tensor_scale,
)
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.range_search import search_grid
from compressor.pipeline.sites import choose_format

CODEBOOKS = ["LUT2", "LUT3", "LUT4", "LUT2_G64", "LUT3_G32", "LUT4_G32"]
NOT_INTEGER = [
    name
    for name, fmt in FORMATS.items()
    if fmt.element is not None and not (fmt.activations is not None and fmt.activations.calibrated)
]


@st.composite
def formats(draw: st.DrawFn) -> Format:
    if draw(st.booleans()):
        return Format.parse(draw(st.sampled_from([*NOT_INTEGER, *CODEBOOKS])))
    sizes = st.integers(1, 3).map(lambda n: 32 * n)
    scales = st.one_of(st.just(TensorScale()), st.just(ChannelScales()), sizes.map(GroupScales), sizes.map(BlockScales))
    integers = st.builds(Integers, st.integers(2, 8), st.booleans())
    planes = st.one_of(
        st.integers(1, 8).map(lambda bits: BitPlanes("bipolar", bits)),
        st.integers(2, 8).map(lambda bits: BitPlanes("balanced", bits)),
    )
    weights = draw(st.one_of(integers, planes, st.just(Integers(8))))
    extras = (TwoPlanes(),) if weights == Integers(8) and draw(st.booleans()) else ()
    return Format(weights, draw(scales), draw(st.sampled_from([None, Activations()])), extras)


@settings(deadline=None, max_examples=80)
@given(formats(), st.integers(1, 50), st.integers(1, 150), st.integers(0, 2**31))
def test_round_trip_is_exact_for_ragged_shapes(fmt: Format, rows: int, columns: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(fmt.levels, (rows, columns), generator=rng, dtype=torch.uint8)
    if fmt.element is not None:  # no code that stands for NaN or infinity
        usable = torch.tensor(fmt.element.rounding[0], dtype=torch.uint8)
        codes = usable[codes.long() % len(usable)]
    groups = fmt.groups(columns)
    if fmt.codebook:
        scales = torch.randn(rows, groups, fmt.levels, generator=rng).half().float()
    else:
        scales = round_scales(torch.rand(rows, groups, generator=rng), fmt)
    zeros = None if fmt.symmetric else torch.randint(fmt.levels, scales.shape, generator=rng, dtype=torch.uint8)
    if fmt.strategy == "block":  # whose rows share the first one's
        first = torch.arange(rows) // fmt.group_size * fmt.group_size
        scales, zeros = scales[first], None if zeros is None else zeros[first]
    unit = torch.rand(1, generator=rng) if fmt.scale_type == "E4M3" else None
    packed = pack(codes, scales, zeros, fmt, unit)
    got_codes, got_scales, got_zeros = unpack(packed)
    assert torch.equal(got_codes, codes) and torch.equal(got_scales, scales)
    assert (got_zeros is None) if zeros is None else torch.equal(got_zeros, zeros)
    assert packed.nbytes == fmt.packed_bytes(rows, columns)
    kinds = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape)) for name, part in packed.parts.items()}
    assert kinds == fmt.parts(rows, columns) and list(kinds) == list(fmt.parts(rows, columns))
    size = fmt.columns(columns)
    for group in range(fmt.groups(columns)):
        part = slice(group * size, (group + 1) * size)
        zero = None if zeros is None else zeros[:, group]
        expected = grid_values(codes[:, part], scales[:, group] * (1 if unit is None else unit), zero, fmt)
        assert torch.equal(dequantize(packed)[:, part], expected)


@settings(deadline=None, max_examples=20)
@given(st.booleans(), st.integers(1, 70), st.integers(1, 40), st.integers(0, 9))
def test_a_block_has_the_grid_of_its_weights_in_one_row(symmetric: bool, rows: int, columns: int, seed: int) -> None:
    fmt = Format(Integers(4, symmetric), BlockScales(32))
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = rtn_quantize(weight, fmt)
    for rows_of_block in torch.arange(rows).split(32):
        for columns_of_block in torch.arange(columns).split(32):
            block = weight[rows_of_block][:, columns_of_block]
            expected = dequantize(rtn_quantize(block.reshape(1, -1), Format(Integers(4, symmetric), ChannelScales())))
            assert torch.equal(dequantize(packed)[rows_of_block][:, columns_of_block], expected.view_as(block))
    with pytest.raises(ValueError, match="rows of a block"):
        pack(
            torch.zeros(2, 32, dtype=torch.uint8),
            torch.tensor([[1.0], [2.0]]),
            None,
            Format(Integers(4), BlockScales(32)),
        )


@pytest.mark.parametrize("name", [*(f"W{b}A16_C" for b in range(2, 9)), "BIP1A16_C", "BIP5A16_C", "BAL2A16_C"])
def test_layout_is_the_documented_one(name: str) -> None:
    """Reads single codes back by the bit positions that the formats module documents."""
    fmt = Format.parse(name)
    rows, columns = 20, 70
    codes = torch.randint(
        fmt.levels, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(fmt.bits)
    )
    packed = pack(codes, torch.ones(rows, 1).half(), None, fmt).parts["codes"]
    for row, column in [(0, 0), (3, 5), (15, 31), (16, 32), (19, 69), (7, 47)]:
        chunk, inside = divmod(column, fmt.chunk_columns)
        value = offset = first = 0
        for width in fmt.planes:
            word, place = divmod(inside, 32 // width)
            j, i = divmod(place, 4)
            bits_of_word = int(packed[row // 16, chunk, first + word, row % 16]) & 0xFFFFFFFF
            value |= (bits_of_word >> (8 * i + width * j) & ((1 << width) - 1)) << offset
            offset, first = offset + width, first + fmt.chunk_columns * width // 32
        assert value == codes[row, column]


@settings(deadline=None, max_examples=60)
@given(formats(), st.integers(1, 9), st.integers(1, 40), st.floats(1e-6, 3e3), st.integers(0, 2**31))
def test_rounding_error_is_at_most_half_a_step(fmt: Format, rows: int, columns: int, size: float, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    unit = tensor_scale(weight, fmt)
    weight = weight if unit is None else weight / unit
    scales, zeros = choose_grid(weight, fmt)
    values = grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
    if fmt.codebook:
        distance = (weight[..., None] - scales[:, None]).abs().amin(-1)
        assert torch.allclose((values - weight).abs(), distance, rtol=1e-6, atol=0)
        return
    if fmt.element is not None:
        nearest = torch.tensor(sorted({v for v in fmt.element.values if v == v}), dtype=torch.float64)
        distance = (weight.double()[..., None] / scales.double()[:, None, None] - nearest).abs().amin(-1)
        assert torch.allclose(((values - weight).double().abs() / scales[:, None]), distance, rtol=1e-6, atol=1e-6)
        return
    # Half a step, one float16 rounding of the scale over the whole range, and what the symmetric grid
    # lacks at its positive end (half a step).
    bound = scales.float()[:, None] * (1.0 + fmt.levels * 2.0**-11) + 2.0**-24 * fmt.levels
    assert bool(((values - weight).abs() <= bound).all())


def test_grid_keeps_zero_and_survives_extremes() -> None:
    for name in ("W4A16_G32", "W4A16_ASYM_G32", "W8A8", "W2A16_ASYM_G32", "BAL1A16_C", "BAL2A8_G32", *NOT_INTEGER):
        fmt = Format.parse(name)
        for weight in (torch.zeros(3, 8), torch.full((3, 8), 1e-30), torch.full((3, 8), -5.0)):
            scales, zeros = choose_grid(weight, fmt)
            values = grid_values(round_to_grid(weight, scales, zeros, fmt), scales, zeros, fmt)
            assert bool(torch.isfinite(values).all())
            zero = round_to_grid(torch.zeros(3, 1), scales, zeros, fmt)
            assert bool((grid_values(zero, scales, zeros, fmt) == 0).all())
        too_large = {"F16": 1e12, "E8M0": 3e38, "E4M3": float("inf")}[fmt.scale_type]
        for bad in (float("nan"), float("inf"), too_large):
            with pytest.raises(CompressorError, match="NaN, inf"):
                choose_grid(torch.full((1, 8), bad), fmt)


def test_names_round_trip_and_errors_say_what_is_near() -> None:
    for name, fmt in FORMATS.items():
        assert fmt.name == name and Format.parse(name) == fmt
    assert Format.parse("w4a16") == Format.parse("W4A16_G128")
    assert Format.parse("W8A8").strategy == "channel"
    for name, expected in [("W4A61_G128", "A61"), ("int4", "nearest"), ("W9A16", "9 bits"), ("W3A16_G48", "32"),
        ("BIP0A8", "BIP has 1 to 8"), ("BIP9A8", "BIP has 1 to 8"), ("BAL8A8", "1 to 7 bits"), ("BIP2A8_G48", "32"),
        ("BIP2A8_ASYM", "symmetric"), ("W1A8", "bit planes"),
        ("LUT5", "2 to 4"), ("LUT3_T", "channels"), ("LUT3A8", "LUT"), ("W4A16_S11", "10"), ("LUT4_F2", "integers"),
        ("FP6_E4M3", "FP6_E"), ("FP4_E0M3", "FP4_E"), ("NF5", "NF4"), ("MXFP4_G64", "MXFP4"), ("FP8_E4M3_G3", "4"),
        ("W8A8_B24", "16 rows"), ("LUT4_B32", "channels"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=expected):
            Format.parse(name)


@pytest.mark.parametrize(
    "name", ["W3A16_C", "BIP1A16_C", "BIP3A16_C", "BAL2A16_C", "FP4_E2M1_C", "FP8_E4M3", "FP8_E5M2", "NF4_C"]
)
def test_neighbours_of_a_code_stand_for_the_next_values(name: str) -> None:
    fmt = Format.parse(name)
    codes = torch.arange(fmt.levels, dtype=torch.uint8)[None]
    values = grid_values(codes, torch.ones(1), None, fmt)[0]
    rising = sorted({float(value) for value in values if torch.isfinite(value)})
    for code, value in zip(codes[0], values, strict=True):
        if not torch.isfinite(value) or (value == 0 and torch.signbit(value)):
            continue  # no weight gets these
        place = rising.index(float(value))
        for higher, expected in ((True, rising[min(place + 1, len(rising) - 1)]), (False, rising[max(place - 1, 0)])):
            found = neighbour_codes(code.view(1, 1), torch.tensor([[higher]]), fmt)
            assert float(grid_values(found, torch.ones(1), None, fmt)) == expected


# --- bit planes


@pytest.mark.parametrize("bits", range(1, 9))
def test_bipolar_codes_are_sums_of_signs(bits: int) -> None:
    """sum of +-2^i over the bits, times half a step (Ma et al. 2024, section 3), in numpy."""
    fmt = Format(BitPlanes("bipolar", bits), ChannelScales())
    codes = np.arange(fmt.levels, dtype=np.uint8)
    signs = [np.where(codes >> i & 1, 1, -1) * 2**i for i in range(bits)]
    packed = pack(torch.from_numpy(codes)[None], torch.full((1, 1), 0.25).half(), None, fmt)
    assert np.array_equal(dequantize(packed)[0].numpy(), 0.125 * np.sum(signs, axis=0))
    assert packed.parts["codes"].numel() == 16 * bits * -(-fmt.levels // 32)


@pytest.mark.parametrize("bits", range(1, 8))
def test_balanced_grids_are_symmetric_and_have_a_zero(bits: int) -> None:
    fmt = Format.parse(f"BAL{bits}A16_C")
    top = 2 ** (bits - 1)
    codes = torch.arange(fmt.levels, dtype=torch.uint8)[None]
    assert grid_values(codes, torch.ones(1), None, fmt)[0].tolist() == list(range(-top, top + 1))
    assert fmt.bits == bits + 1  # what is stored
    weight = torch.linspace(-3, 3, 50)[None]
    scales, _ = choose_grid(weight, fmt)
    nearest = torch.round(weight.double() / scales.double()[:, None]).clamp(-top, top)
    assert torch.equal(round_to_grid(weight, scales, None, fmt).double() - top, nearest)


def test_a_group_of_zeros_is_as_near_zero_as_a_bipolar_grid_comes() -> None:
    fmt = Format.parse("BIP2A16_C")
    for grid in (choose_grid, lambda w, f: search_grid(w, torch.ones(8), f)):
        scales, _ = grid(torch.zeros(3, 8), fmt)
        values = grid_values(round_to_grid(torch.zeros(3, 8), scales, None, fmt), scales, None, fmt)
        assert float(values.abs().max()) == 2.0**-25
    with pytest.raises(CompressorError, match="NaN, inf"):
        choose_grid(torch.full((1, 8), float("nan")), fmt)


@pytest.mark.parametrize(("name", "why"), [
    ("W4A16_P4", "8 bits"), ("W8A8_ASYM_P4", "symmetric"), ("W8A16_S1_P4", "other extra"), ("FP8_E4M3_P4", "integers"),
    ("W8A8_OF8", "4 bits"),
])  # fmt: skip
def test_codes_of_other_formats_do_not_lie_in_two_planes(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Format.parse(name)
    with pytest.raises(UsageError, match="upper plane of one in W8, _P4"):
        choose_format("W4A8_C_OF8")
