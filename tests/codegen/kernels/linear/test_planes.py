"""Codes in two planes: the bits of the format without them, and of the upper plane what the eager definition gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from kernel_cases import OPS, TOLERANCE, build, relative_error, run

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed
from compressor.codegen.targets import x86
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize, unpack
from compressor.numerics.nearest import rtn_quantize

ROWS, COLUMNS = 40, 88  # of other numbers than multiples of eight, floats are added up in another order
VNNI, AVX2 = x86.AVX512_VNNI, x86.AVX2
CASES = [("W8A8_P4", VNNI), ("W8A16_G32_P4", AVX2)]
by_case = pytest.mark.parametrize(("name", "isa"), CASES, ids=lambda one: one if isinstance(one, str) else one.name)


def weight(fmt: Format) -> PackedWeight:
    return rtn_quantize(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)), fmt)


@functools.cache
def kernel(fmt: Format, isa: Isa) -> Any:
    return build(packed.packed_linear(ROWS, COLUMNS, fmt, False, isa, packed.Schedule(1, 1, 2)), isa)


@by_case
def test_both_planes_give_the_bits_of_whole_codes(name: str, isa: Isa) -> None:
    fmt, plain = Format.parse(name), Format.parse(name.removesuffix("_P4"))
    stored, whole = weight(fmt), weight(plain)
    for tokens in (1, 3, 40):
        x = torch.randn(1, tokens, COLUMNS, generator=torch.Generator().manual_seed(1))
        out = (1, tokens, ROWS)
        found = run(kernel(fmt, isa), x, *stored.parts.values(), out=out)
        assert torch.equal(found, run(kernel(plain, isa), x, *whole.parts.values(), out=out))


@by_case
def test_the_upper_plane_alone_computes_what_it_stands_for(name: str, isa: Isa) -> None:
    stored, upper = weight(Format.parse(name)), Format.parse(name).upper
    parts = [stored.parts[part] for part in upper.parts(ROWS, COLUMNS)]
    codes, scales, _ = unpack(stored)
    spread = scales.repeat_interleave(32 if upper.group_size else COLUMNS, dim=1)[:, :COLUMNS]
    expected = ((codes // 16).float() * 16 + 8 - 128) * spread  # the middle of the codes with these upper bits
    assert torch.equal(dequantize(PackedWeight.of(parts, upper, (ROWS, COLUMNS))), expected)
    for tokens in (1, 3):
        x = torch.randn(1, tokens, COLUMNS, generator=torch.Generator().manual_seed(2))
        eager = OPS.packed_linear(x, parts, None, upper.name, COLUMNS, ROWS)
        assert relative_error(run(kernel(upper, isa), x, *parts, out=(1, tokens, ROWS)), eager) < TOLERANCE
