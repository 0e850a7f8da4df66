"""The linear of N:M against its operator in float64: ragged shapes, formats, tokens, several weights."""

from __future__ import annotations

import pytest
import torch
import tvm
from kernel_cases import OPS, WIDTHS, build, random_packed, relative_error, run

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.n_of_m import n_of_m_linear, supports
from compressor.formats.format import Format

CLOSE = 2e-6  # of the largest output: sums in float32


@pytest.mark.parametrize("isa", WIDTHS, ids=lambda isa: isa.name)
@pytest.mark.parametrize(("name", "rows", "columns"), [
    ("W8A16_2:4", 16, 40), ("W8A16_2:4", 100, 132), ("W4A16_G32_2:4", 37, 148), ("W8A16_G64_1:4", 50, 300),
    ("W4A16_C_2:8", 48, 200),
])  # fmt: skip
def test_n_of_m_linear(name: str, rows: int, columns: int, isa: Isa) -> None:
    rng = torch.Generator().manual_seed(rows)
    packed = random_packed(Format.parse(name), rows, columns, rng)
    parts, has_bias = list(packed.parts.values()), rows % 3 == 1
    bias = torch.randn(rows, generator=rng) if has_bias else None
    kernel = build(n_of_m_linear([rows], columns, packed.format, has_bias, isa), isa)
    x = torch.randn(3, 3, columns, generator=rng)
    alone = []
    for given in (x, x[:1, :1], x[2:, 2:]):
        expected = OPS.packed_linear(
            given.double(), parts, None if bias is None else bias.double(), packed.format.name, columns, rows
        )
        alone.append(run(kernel, given.contiguous(), *parts, bias, out=(*given.shape[:2], rows)))
        assert relative_error(alone[-1], expected) < CLOSE
    # A row's bits do not depend on how many rows are computed with it.
    assert torch.equal(alone[0][:1, :1], alone[1]) and torch.equal(alone[0][2:, 2:], alone[2])


def test_several_weights_share_computed_inputs() -> None:
    isa, rng, fmt = WIDTHS[0], torch.Generator().manual_seed(5), Format.parse("W8A16_2:4")
    rows = [33, 16]
    packed = [random_packed(fmt, n, 48, rng) for n in rows]
    func = n_of_m_linear(rows, 48, fmt, False, isa, prologue=Prologue("silu", gated=True))
    for tokens in (1, 6):
        gate, up = torch.randn(2, 1, tokens, 48, generator=rng)
        stored = [part for weight in packed for part in weight.parts.values()]
        got = [tvm.runtime.tensor(torch.zeros(1, tokens, n).numpy()) for n in rows]
        build(func, isa)(*(tvm.runtime.tensor(x.contiguous().numpy()) for x in (gate, up, *stored)), *got)
        x = torch.nn.functional.silu(gate.double()) * up.double()
        for weight, found in zip(packed, got, strict=True):
            expected = OPS.packed_linear(x, list(weight.parts.values()), None, fmt.name, 48, weight.shape[0])
            assert relative_error(torch.from_numpy(found.numpy()), expected) < CLOSE


def test_too_many_choices_are_named() -> None:
    assert "at most 32 choices a group, 70 are too many" in supports(Format.parse("W8A16_4:8"))
    assert not supports(Format.parse("W8A16_2:4")) and not supports(Format.parse("W8A16"))
