"""Products of several tokens by AMX's tiles, against the eager packed linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import OPS, build, random_packed, relative_error, run, tolerance

from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.targets import x86
from compressor.formats.format import Format

pytestmark = pytest.mark.of_x86


@pytest.mark.parametrize("name", [
    "W8A8", "W4A8_G128", "W4A8_ASYM_G32", "W8A8_ASYM_G32_AG64", "W3A8_G64_S1", "W6A8_C",
    "W4A16_G128", "W4A16_ASYM_G32", "W3A16_C", "W8A16_C", "FP6_E3M2_G64", "NVFP4", "FP8_E4M3_AFP8_E4M3",
])  # fmt: skip
def test_tiles_take_any_number_of_tokens(name: str) -> None:
    """One register's rows, two, a whole block of tokens and more; whole registers of columns, and rows of two tiles."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(len(name))
    rows, columns = (64, 256) if name[1] in "48" else (50, 200)  # whole registers, and not
    packed = random_packed(fmt, rows, columns, rng)
    tiles = packed.parts["codes"].shape[0]
    (schedule,) = packed_linear.gemm_space(tiles, 1, fmt, x86.AMX)
    kernel = build(packed_linear.packed_linear(rows, columns, fmt, False, x86.AMX, schedule), x86.AMX)
    check_tokens(kernel, packed, fmt, None, rng)


@pytest.mark.parametrize(("name", "rows", "columns"), [
    ("W4A8_G128", 32, 384),  # two registers of columns a group, for two tiles: they stay in registers
    ("W4A8_G192", 16, 384),  # three, for one tile
    ("W4A8_G256", 32, 512),  # more than stay
    ("W8A8", 32, 512),  # one group: outputs are written once, with their bias
    ("W8A8_ASYM", 16, 96), ("W8A16", 48, 64), ("W4A8_S0.5", 32, 128),
])  # fmt: skip
def test_tiles_of_each_kind_of_group_add_a_bias(name: str, rows: int, columns: int) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(rows + columns)
    packed, bias = random_packed(fmt, rows, columns, rng), torch.randn(rows, generator=rng)
    (schedule,) = packed_linear.gemm_space(rows // 16, 1, fmt, x86.AMX)
    kernel = build(packed_linear.packed_linear(rows, columns, fmt, True, x86.AMX, schedule), x86.AMX)
    check_tokens(kernel, packed, fmt, bias, rng)


@pytest.mark.parametrize("name", ["W2A16_ASYM_G128", "W4A16_G128", "W8A16_G64"])
def test_a_shorter_last_group_reads_nothing_of_the_next_token(name: str) -> None:
    """Zeros of its last register times NaN would be NaN; behind the last token is memory that nobody wrote."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(7)
    packed = random_packed(fmt, 19, 146, rng)
    (schedule,) = packed_linear.gemm_space(2, 1, fmt, x86.AMX)
    kernel = build(packed_linear.packed_linear(19, 146, fmt, False, x86.AMX, schedule), x86.AMX)
    x = torch.randn(1, 4, 146, generator=rng)
    x[0, 1::2] = float("nan")
    got = run(kernel, x, *packed.parts.values(), out=(1, 4, 19))
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 146, 19)
    assert relative_error(got[:, ::2], expected[:, ::2]) < tolerance(fmt, x86.AMX)


def check_tokens(kernel: Any, packed: Any, fmt: Format, bias: torch.Tensor | None, rng: torch.Generator) -> None:
    """One register's rows of tokens, two, a whole block and more."""
    rows, columns = packed.shape
    for tokens in (2, 16, 33, 128, 300):
        x = torch.randn(1, tokens, columns, generator=rng)
        got = run(kernel, x, *packed.parts.values(), bias, out=(1, tokens, rows))
        expected = OPS.packed_linear(x, list(packed.parts.values()), bias, fmt.name, columns, rows)
        assert relative_error(got, expected) < tolerance(fmt, x86.AMX), tokens
