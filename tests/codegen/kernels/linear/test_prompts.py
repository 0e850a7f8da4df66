"""Prompts where blocks of columns are left out: against the operator in PyTorch, and bit for bit against one token."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import OPS, TOLERANCE, build, random_packed, relative_error, run

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import prompts
from compressor.codegen.kernels.linear.packed import Schedule, packed_linear
from compressor.codegen.targets import x86
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.layouts.columns import of_blocks
from compressor.formats.packing import kept_part, leave_out

CASES = [
    ("W8A8_B16x1@60", 40, 700, x86.AVX512_VNNI),  # 280 columns: gathered in two spans
    ("W4A8_ASYM_G32_B16x1@50", 48, 150, x86.AVX512_VNNI),  # 80: the last group is short
    ("W8A8_B32x64@50", 40, 700, x86.AVX512_VNNI),  # blocks of 64 columns, the last of which is not full
    ("W8A8_B32x64@50", 80, 700, x86.AMX),
    ("W4A8_G192_B32x64@60", 64, 960, x86.AMX),  # six blocks are kept, three of a group
    ("W8A8_B16x1@1", 21, 71, x86.AVX512_VNNI),  # all 71 are kept, and do not fill the last four
    ("W3A8_G64_B16x1@80", 16, 900, x86.AVX512_VPOPCNTDQ),  # few tokens are squeezed one by one
    ("W5A8_ASYM_B16x1@97", 61, 999, x86.AVX512_VPOPCNTDQ),  # alone: four tiles, fewer chunks than steps of squeezing
]


@functools.cache
def kernel(name: str, rows: int, columns: int, isa: Isa) -> Any:
    schedule = Schedule(-(-rows // 16), 1, 2)  # one token's tiles come one after another
    return build(packed_linear(rows, columns, Format.parse(name), True, isa, schedule), isa)


@pytest.mark.parametrize(("name", "rows", "columns", "isa"), CASES, ids=lambda value: getattr(value, "name", value))
@settings(deadline=None, max_examples=12)
@given(st.sampled_from(["random", "first", "last", "every"]), st.integers(2, 200), st.integers(0, 99))
def test_prompts(name: str, rows: int, columns: int, isa: Isa, pattern: str, tokens: int, seed: int) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(seed)
    packed, blocks = random_packed(fmt, rows, columns, rng), fmt.extra(ColumnBlocks)
    assert blocks is not None
    if pattern != "random":  # runs of full and of empty words of bits
        width, count = blocks.width, fmt.stored_columns(columns) // blocks.width
        first = {"first": 0, "last": blocks.blocks(columns) - count, "every": 0}[pattern]
        kept = first + torch.arange(count) * (blocks.blocks(columns) // count if pattern == "every" else 1)
        every = of_blocks(kept.expand(-(-rows // 16), count), width)
        packed = leave_out(kept_part(packed), every, columns, blocks)
    x, bias = torch.randn(1, tokens, columns, generator=rng), torch.randn(rows, generator=rng)
    x[0, tokens // 2] = 0.0  # a token of zeros has no activation scale
    operands = (*packed.parts.values(), bias)
    got = run(kernel(name, rows, columns, isa), x, *operands, out=(1, tokens, rows))
    expected = OPS.packed_linear(x, list(packed.parts.values()), bias, fmt.name, columns, rows)
    assert relative_error(got, expected) < TOLERANCE
    row = seed % tokens
    alone = run(kernel(name, rows, columns, isa), x[:, row : row + 1].contiguous(), *operands, out=(1, 1, rows))
    if isa.matrix_unit:  # sums of groups are rounded in another order there
        assert relative_error(alone[0, 0], got[0, row]) < TOLERANCE
    else:
        assert torch.equal(alone[0, 0], got[0, row])


def test_a_token_with_nan_has_no_outputs_and_others_have() -> None:
    name, rows, columns, isa = CASES[0]
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    packed, x = random_packed(fmt, rows, columns, rng), torch.randn(1, 70, columns, generator=rng)
    x[0, 3, 5], x[0, 66, 7] = float("nan"), float("inf")
    got = run(kernel(name, rows, columns, isa), x, *packed.parts.values(), torch.zeros(rows), out=(1, 70, rows))
    finite = torch.isfinite(got).all(-1)[0]
    assert [row for row in range(70) if not finite[row]] == [3, 66] and not torch.isfinite(got[0, [3, 66]]).any()


@pytest.mark.of_x86
def test_where_a_dense_weight_would_take_less_time() -> None:
    def says(name: str, isa: Isa) -> str:
        return prompts.slower(Format.parse(name), isa)

    assert says("W8A8", x86.AVX512_VNNI) == says("W8A8_B16x1@50", x86.AVX512_VNNI) == ""
    assert "prompts would be quicker stored dense, in W8A8" in says("W8A8_B16x1@20", x86.AVX512_VNNI)
    assert "activations are floats" in says("W8A16_B16x1@80", x86.AVX512_VNNI)
    assert "that pays from 88% on" in says("W8A8_B16x1@80", x86.AMX) and not says("W8A8_B16x1@95", x86.AMX)
    assert "does not squeeze" in says("W8A8_B16x1@95", x86.AVX2)
    assert not says("W8A8_B32x64@40", x86.AMX) and "from 30% on" in says("W8A8_B32x64@20", x86.AMX)
    assert not says("W8A8_B32x64@50", x86.AVX512_VNNI) and "from 40% on" in says("W8A8_B32x64@20", x86.AVX512_VNNI)
    assert "activations are floats" in says("W8A16_B32x64@80", x86.AMX)
