"""The linear of single weights that are left out against its operator: kinds of codes, random masks, empty and full."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    OPS,
    SPLIT,
    TOLERANCE,
    build,
    check_packed_linear,
    executes,
    random_packed,
    relative_error,
    run,
)  # fmt: skip

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.targets import x86
from compressor.formats.extras import SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import leave_out_singles

VBMI2 = x86.AVX512_VPOPCNTDQ
HERE = [isa for isa in dict.fromkeys((VBMI2, x86.AVX2, x86.AMX)) if executes(isa)]
"""One that spreads a register, one that spreads eight bytes, and one with tiles."""
SMALL = {VBMI2: "W4A8_G32_B1x1@50", x86.AVX2: "W8A8_G32_B1x1@50", x86.AMX: "W8A16_G32_B1x1@50"}
"""Codes of a byte are spread as they are stored, others are unpacked first."""


@pytest.mark.parametrize(("name", "isa"), [
    ("W8A8_B1x1@50", x86.AVX512_VNNI), ("W3A8_ASYM_G32_B1x1@60", x86.AVX2), ("NF4_G64_B1x1@50", x86.AMX),
    *((name, isa) for isa in (VBMI2, x86.AMX) for name in ("W8A8_B1x1@50", "W4A16_ASYM_G32_B1x1@70", "NVFP4_B1x1@30")),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_kinds_of_codes_and_ragged_shapes(name: str, isa: Isa) -> None:
    check_packed_linear(Format.parse(name), isa, random.Random(f"{name} {isa.name}"), torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=HERE, ids=lambda isa: isa.name)
def small(request: pytest.FixtureRequest) -> tuple[tvm.runtime.Module, Format]:
    """Return a kernel of 48 x 80 weights, and their format."""
    isa, fmt = request.param, Format.parse(SMALL[request.param])
    schedule = packed_linear.gemm_space(3, 1, fmt, isa)[0]
    return build(packed_linear.packed_linear(48, 80, fmt, False, isa, schedule), isa), fmt


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["empty", "full", "any"]), min_size=48, max_size=48), st.integers(0, 2**31))
def test_random_masks_with_empty_and_full_rows(
    small: tuple[tvm.runtime.Module, Format], kinds: list[str], seed: int
) -> None:
    """Rows are empty and full as far as half of all weights allow, and so are tiles."""
    (kernel, fmt), rng = small, torch.Generator().manual_seed(seed)
    first = {"empty": 2.0, "any": 0.0, "full": -2.0}
    order = torch.rand(48, 80, generator=rng) + torch.tensor([first[kind] for kind in kinds])[:, None]
    kept = torch.zeros(48 * 80, dtype=torch.bool)
    kept[order.flatten().argsort()[: 48 * 80 // 2]] = True
    packed = leave_out_singles(random_packed(fmt.of_kept, 48, 80, rng), kept.view(48, 80), SingleZeros(50))
    parts = list(packed.parts.values())
    for tokens in (1, 5):
        x = torch.randn(1, tokens, 80, generator=rng)
        got = run(kernel, x, *parts, out=(1, tokens, 48))
        expected = OPS.packed_linear(x, parts, None, fmt.name, 80, 48)
        assert relative_error(got, expected) < (TOLERANCE if tokens == 1 else SPLIT)
        is_empty = ~kept.view(48, 80).any(1)
        assert not (fmt.integer_products and bool(got[..., is_empty].any()))  # sums of integers cancel exactly


def test_wrong_bits_and_starts_read_nothing_outside(small: tuple[tvm.runtime.Module, Format]) -> None:
    """Other tiles keep their outputs; codes end where memory may end, of which a read behind would be a fault."""
    (kernel, fmt), rng = small, torch.Generator().manual_seed(3)
    packed, x = random_packed(fmt, 48, 80, rng), torch.randn(1, 3, 80, generator=rng)
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 80, 48)
    for start in (-(2**31), 2**31 - 1, 48 * 40 - 1):
        starts, kept = packed.parts["starts"].clone(), packed.parts["kept"].clone()
        starts[1], kept[1] = start, 255
        wrong = {**packed.parts, "starts": starts, "kept": kept}
        for tokens in (1, 3):
            got = run(kernel, x[:, :tokens], *wrong.values(), out=(1, tokens, 48))
            rows = torch.tensor([*range(16), *range(32, 48)])
            error = relative_error(got[..., rows], expected[:, :tokens, rows])
            assert error < (TOLERANCE if tokens == 1 else SPLIT)


def test_several_weights_share_computed_inputs() -> None:
    isa, rng, fmt = HERE[0], torch.Generator().manual_seed(5), Format.parse("W8A16_B1x1@50")
    rows, schedule = [64, 32], packed_linear.Schedule(2, 1, 2)
    packed = [random_packed(fmt, n, 96, rng) for n in rows]
    func = packed_linear.fused_linear(rows, 96, fmt, False, isa, schedule, prologue=Prologue("silu", gated=True))
    kernel = build(func, isa)
    for tokens in (1, 6):
        gate, up = torch.randn(2, 1, tokens, 96, generator=rng)
        stored = [part for weight in packed for part in weight.parts.values()]
        got = [tvm.runtime.tensor(torch.zeros(1, tokens, n).numpy()) for n in rows]
        kernel(*(tvm.runtime.tensor(x.contiguous().numpy()) for x in (gate, up, *stored)), *got)
        x = torch.nn.functional.silu(gate.double()) * up.double()
        for weight, found in zip(packed, got, strict=True):
            expected = OPS.packed_linear(x, list(weight.parts.values()), None, fmt.name, 96, weight.shape[0])
            assert relative_error(torch.from_numpy(found.numpy()), expected) < TOLERANCE


def test_what_is_not_expanded_is_named() -> None:
    poor, fmt = replace(x86.AVX2, name="poor", spread_eight=None), Format.parse("W8A16_B1x1@50")
    assert packed_linear.supports(fmt, poor) == "poor has no instruction that spreads bytes"
    assert all(not packed_linear.supports(fmt, isa) for isa in x86.ISAS.values())
    assert "zero points of groups of 48 columns" in packed_linear.supports(
        Format.parse("W8A16_ASYM_G48_B1x1@50"), x86.AVX2
    )
