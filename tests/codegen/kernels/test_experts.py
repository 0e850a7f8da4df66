"""Routed linears and top-k against the eager definitions: several formats, ragged shapes, experts without a token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import tvm
from kernel_cases import OPS, TOLERANCE, WIDTHS, build, random_packed, relative_error, run, tolerance

from compressor.codegen.isa import INDEPENDENT_ROWS, Isa
from compressor.codegen.kernels import experts
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear.packed import Schedule
from compressor.codegen.kernels.linear.tiles import TOKENS
from compressor.codegen.kernels.linear.tiles import supports as tiles_support
from compressor.codegen.kernels.top_k import top_k
from compressor.codegen.targets import x86
from compressor.formats.format import Format

EXPERTS = 5


def routes(tokens: int, each: int, rng: torch.Generator, absent: int = -1) -> torch.Tensor:
    """Choose different experts for each token, never the third; ``absent`` in the place of some."""
    some = torch.tensor([0, 1, 3, 4])
    index = torch.stack([some[torch.randperm(4, generator=rng)[:each]] for _ in range(tokens)])
    return torch.where((index == 4) & (torch.arange(tokens)[:, None] % 2 == 1), absent, index)


@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("W4A8_G32", x86.AVX2),
        ("W4A16_G32", x86.AMX),
        ("W3A8_ASYM_G64", x86.AVX512_VNNI),
        ("W8A8_STATIC", x86.AVX2),
        ("W8A8", x86.AMX),
        ("NF4_G64", x86.AVX512_VNNI),
        ("W4A8_G32_B16x1@60", x86.AVX512_VNNI),
        ("W8A16_B16x1@60", x86.AVX2),
        ("NVFP4_S0.5", x86.AVX2),
        ("W4A16_ASYM_G32_F1", x86.AVX512_VNNI),
        ("BIP2A8_G128", x86.AVX2),
        ("LUT3", x86.AVX2),
        ("FP8_E4M3_B32", x86.AVX2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_packed_routed_linear(name: str, isa: Isa) -> None:
    pick, rng = random.Random(f"{name} {isa.name}"), torch.Generator().manual_seed(1)
    own_rows = name in ("W4A16_G32", "W8A8_STATIC", "LUT3", "W4A16_ASYM_G32_F1")
    fmt, each = Format.parse(name), pick.choice([1, 2, 3])
    rows, columns, has_bias = pick.choice([16, 40]), pick.randint(64, 150), pick.random() < 0.5
    weights = [random_packed(fmt, rows, columns, rng) for _ in range(EXPERTS)]
    if "input_scale" in weights[0].parts:
        weights = [w.with_input_scale(torch.tensor([0.02 + 0.01 * e])) for e, w in enumerate(weights)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    tiles = -(-rows // 16)
    schedule = Schedule(1, 2 - tiles % 2, TOKENS) if not tiles_support(fmt, isa) else Schedule(1, 1, 2)
    routing = Routing(EXPERTS, each, own_rows)
    kernel = build(experts.packed_routed_linear(routing, rows, columns, fmt, has_bias, isa, schedule), isa)
    for tokens in (1, 2, 19):
        x = torch.randn(routing.inputs(tokens, columns), generator=rng)
        index = routes(tokens, each, rng)
        got = run(kernel, x, index, *parts, bias, out=(tokens, each, rows))
        expected = OPS.packed_routed_linear(x, index, parts, bias, fmt.name, columns, rows)
        assert relative_error(got, expected) < tolerance(fmt, isa, 1 if tokens == 1 else INDEPENDENT_ROWS + 1), tokens
        assert bool((got[index < 0] == 0).all())


def test_a_token_gets_the_same_bits_in_any_company() -> None:
    rng = torch.Generator().manual_seed(2)
    fmt, isa, routing = Format.parse("W4A16_G32"), x86.AVX2, Routing(EXPERTS, 2, False)
    weights = [random_packed(fmt, 32, 64, rng) for _ in range(EXPERTS)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]
    kernel = build(experts.packed_routed_linear(routing, 32, 64, fmt, False, isa, Schedule(2, 1, 4)), isa)
    x, index = torch.randn(9, 64, generator=rng), routes(9, 2, rng)
    alone = [run(kernel, x[t : t + 1], index[t : t + 1], *parts, out=(1, 2, 32)) for t in range(9)]
    assert torch.equal(run(kernel, x, index, *parts, out=(9, 2, 32)), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own_rows", [False, True], ids=["shared", "own"])
def test_dense_routed_linear(dtype: torch.dtype, own_rows: bool) -> None:
    rng, routing = torch.Generator().manual_seed(3), Routing(EXPERTS, 2, own_rows)
    rows, columns, has_bias = 21, 45, own_rows
    weight = torch.randn(EXPERTS, rows, columns, generator=rng).to(dtype)
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    storage = {torch.bfloat16: "uint16"}.get(dtype, str(dtype).removeprefix("torch."))
    kernel = build(experts.dense_routed_linear(routing, rows, columns, storage, has_bias, 4), WIDTHS[-1])
    for tokens in (1, 7):
        x, index = torch.randn(routing.inputs(tokens, columns), generator=rng), routes(tokens, 2, rng)
        got = run(kernel, x, index, weight, bias, out=(tokens, 2, rows))
        assert relative_error(got, OPS.routed_linear(x, index, weight, bias)) < TOLERANCE


def test_top_k() -> None:
    kernel = build(top_k(13, 4), x86.AVX2)
    x = torch.randn(6, 13, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].round()  # ties: the first comes first
    x[2, 5], x[3, :] = float("nan"), -float("inf")
    for rows in (x, x[1:2]):
        out = tvm.runtime.tensor(np.full((len(rows), 4), -1, "int64"))
        kernel(tvm.runtime.tensor(rows.numpy()), out)
        assert torch.equal(torch.from_numpy(out.numpy()), OPS.top_k(rows, 4))
    values, places = torch.topk(x[0], 4)
    assert torch.equal(OPS.top_k(x[:1], 4)[0], places) and torch.equal(x[0][OPS.top_k(x[0], 4)], values)
