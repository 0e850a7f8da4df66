"""Convolutions that skip groups of four inputs, against the eager reference: geometries, formats, random patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import build, call, pairs, random_packed, relative_error
from torch import Tensor

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.groups import GroupProducts
from compressor.codegen.kernels.convolution.kernel import Epilogue, convolution, convolution_name, supports
from compressor.codegen.kernels.linear.packed import supports as linear_supports
from compressor.codegen.kernels.linear.prompts import slower
from compressor.codegen.lowering.convolutions import fused_convolution
from compressor.codegen.targets import x86
from compressor.formats.format import Format
from compressor.formats.layouts.columns import of_blocks, to_bits

TOLERANCE = 2e-6  # of the largest output: both sides apply scales in float32
ONE, THREE = ((1, 1), (1, 1), (0, 0), (1, 1)), ((3, 3), (1, 1), (1, 1), (1, 1))

# size, channels, out, pairs, format: outputs that fill no block, rows that fill no tile, many tiles, strides, dilation
CASES: dict[str, Any] = {
    "pixels": ((7, 7), 36, 40, ONE, "W8A8_STATIC_B32x4@30"),
    "one pixel": ((1, 1), 8, 16, ONE, "W8A8_STATIC_B32x4@50"),
    "parts of the rows": ((7, 7), 64, 384, ONE, "W8A8_STATIC_B32x4@70"),
    "4 bits": ((5, 9), 40, 20, ONE, "W4A8_C_STATIC_B32x4@50"),
    "every second": ((9, 6), 12, 16, ((1, 1), (2, 2), (0, 0), (1, 1)), "W8A8_STATIC_B32x4@30"),
    "three by three": ((9, 12), 20, 37, ((3, 3), (2, 2), (1, 1), (1, 1)), "W8A8_STATIC_B32x4@30"),
    "dilated": ((11, 10), 8, 16, ((3, 5), (1, 1), (2, 2), (2, 2)), "W8A8_STATIC_B32x4@50"),
    "nothing is left out": ((5, 5), 8, 24, THREE, "W8A8_STATIC_B32x4@1"),
    "one group is left": ((6, 30), 32, 16, THREE, "W8A8_STATIC_B32x4@99"),
}


class Case:
    """A kernel that reads bytes, and its operands."""

    def __init__(self, name: str, isa: Isa) -> None:
        size, channels, self.rows, geometry, scheme = CASES[name]
        self.geometry, self.fmt = Geometry(size, channels, *geometry), Format.parse(scheme)
        assert not supports(self.fmt, self.geometry)
        epilogue = Epilogue(True, True)
        self.kernel = build(convolution(self.rows, self.geometry, self.fmt, True, True, epilogue, isa), isa)
        self.more = (self.fmt.name, self.rows, pairs(self.geometry), True, None)

    def check(self, seed: int, empty: float = 0.0) -> None:
        """Compare with the reference, over a random pattern; a share of the rows is empty."""
        rng, geometry = torch.Generator().manual_seed(seed), self.geometry
        parts = list(random_packed(self.fmt, self.rows, geometry.columns, rng).parts.values())
        parts[1][torch.rand(parts[1].shape, generator=rng) < empty] = 0
        stored = torch.randint(1, 256, (2, *geometry.size, geometry.channels), generator=rng).to(torch.uint8)
        residual, bias = torch.randn(2, *geometry.outputs, self.rows, generator=rng), torch.randn(self.rows)
        given: tuple[Tensor, ...] = (stored.view(torch.int8), *parts, bias, residual)
        got = call(self.kernel, *given, out=tuple(residual.shape))
        expected = fused_convolution(stored.view(torch.int8), parts, bias, residual, None, *self.more)
        assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_geometries(name: str) -> None:
    Case(name, x86.AVX512_VNNI).check(0)


@pytest.mark.parametrize("name", ["pixels", "dilated"])
def test_without_registers_that_squeeze(name: str) -> None:
    Case(name, x86.AVX2).check(1)


def test_any_pattern() -> None:
    cases = [Case(name, x86.AVX512_VNNI) for name in ("pixels", "three by three")]

    @settings(deadline=None, max_examples=40)
    @given(st.sampled_from(cases), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**31))
    def check(case: Case, empty: float, seed: int) -> None:
        case.check(seed, empty)

    check()


def test_floats_are_rounded_as_the_dense_kernel_rounds_them() -> None:
    """A pattern that keeps all columns has the bits of the dense format."""
    geometry, isa = Geometry((6, 7), 16, *THREE), x86.AVX512_VNNI
    rng = torch.Generator().manual_seed(0)
    fmt = Format.parse("W8A8_STATIC_B32x4@1")
    dense = random_packed(fmt.of_kept, 32, geometry.columns, rng).parts
    x, found = torch.randn(2, 6, 7, 16, generator=rng), []
    kept = to_bits(of_blocks(torch.arange(geometry.columns // 4).expand(1, -1), 4), geometry.columns, 4)
    for each, more in ((fmt.of_kept, []), (fmt, [kept])):
        kernel = build(convolution(32, geometry, each, False, False, Epilogue(), isa), isa)
        found.append(call(kernel, x, *dense.values(), *more, out=(2, 6, 7, 32)))
    assert torch.equal(*found)


def test_more_bits_than_there_is_room_for_do_no_harm() -> None:
    case = Case("pixels", x86.AVX512_VNNI)
    parts = random_packed(case.fmt, case.rows, case.geometry.columns, torch.Generator().manual_seed(0)).parts
    x = torch.zeros(1, *case.geometry.size, case.geometry.channels, dtype=torch.int8)
    residual = torch.zeros(1, *case.geometry.outputs, case.rows)
    for byte in (0, 255):
        damaged = {**parts, "kept": torch.full_like(parts["kept"], byte)}
        call(case.kernel, x + 1, *damaged.values(), residual[0, 0, 0], residual, out=tuple(residual.shape))


@pytest.mark.of_x86
def test_what_has_no_kernel_and_what_is_slower() -> None:
    fmt, pixels = Format.parse("W8A8_STATIC_B32x4@30"), Geometry((7, 7), 16, *ONE)
    assert "6 channels are not a multiple of 4" in supports(fmt, Geometry((7, 7), 6, *ONE))
    assert "blocks of 1 column" in supports(Format.parse("W8A8_STATIC_B16x1@30"), pixels)
    assert "does not read what _B32x4@30" in linear_supports(fmt, x86.AVX512_VNNI)
    assert "AMX" in slower(fmt, x86.AMX) and not slower(fmt, x86.AVX512_VNNI)
    assert "@" not in convolution_name(16, pixels, fmt, True, True, Epilogue())  # linkers read it as a version


@pytest.mark.of_x86
def test_lone_tiles_take_more_outputs_than_pairs_do() -> None:
    """24 sums: as many products for each load of weights and activations as the dense kernel has."""
    fmt, geometry = Format.parse("W8A8_STATIC_B32x4@30"), Geometry((14, 24), 16, *THREE)
    from compressor.codegen.kernels.convolution.feeds import ImageFeed

    assert fmt.activations is not None
    feed = ImageFeed(geometry, fmt.activations, is_rounded=True)
    found = [GroupProducts(feed, fmt, tiles, x86.AVX512_VNNI) for tiles in (4, 3)]
    assert [(each.n_tiles, each.outputs) for each in found] == [(2, 12), (1, 24)]
