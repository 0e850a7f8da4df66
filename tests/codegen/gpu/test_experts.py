"""Routed linears on a CPU in lockstep, against the eager operators: formats, ragged shapes, experts without a token."""

from __future__ import annotations

import random

import lockstep
import pytest
import torch
from kernel_cases import OPS, SPLIT, TOLERANCE, random_packed, relative_error
from lockstep import build, run

from compressor.codegen.gpu.experts.packed import packed_routed_linear
from compressor.codegen.gpu.linear.packed import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.kernels.experts import Routing
from compressor.formats.format import Format

EXPERTS = 5
SMALL = Schedule(Streaming(4, 8, 2), Streaming(2, 8, 2), Tiling(1, 1, 2, 1, 2, 2, 1))


def routes(tokens: int, each: int, rng: torch.Generator, absent: int = -1) -> torch.Tensor:
    """Choose different experts for each token, never the third; ``absent`` in the place of some."""
    some = torch.tensor([0, 1, 3, 4])
    index = torch.stack([some[torch.randperm(4, generator=rng)[:each]] for _ in range(tokens)])
    return torch.where((index == 4) & (torch.arange(tokens)[:, None] % 2 == 1), absent, index)


@pytest.mark.parametrize("name", ["W4A8_G64", "W4A16_G64"])
def test_packed_routed_linear(name: str) -> None:
    pick, rng = random.Random(name), torch.Generator().manual_seed(1)
    fmt, each, own_rows = Format.parse(name), pick.choice([1, 2, 3]), name in ("W4A16_G64")
    rows, columns, has_bias = pick.choice([16, 40, 33]), pick.randint(64, 150), pick.random() < 0.5
    weights = [random_packed(fmt, rows, columns, rng) for _ in range(EXPERTS)]
    if "input_scale" in weights[0].parts:
        weights = [w.with_input_scale(torch.tensor([0.02 + 0.01 * e])) for e, w in enumerate(weights)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    routing = Routing(EXPERTS, each, own_rows)
    kernel = build(packed_routed_linear(routing, rows, columns, fmt, has_bias, SMALL))
    for tokens in (1, 2, 19, 90 // each):
        x = torch.randn(routing.inputs(tokens, columns), generator=rng)
        index = routes(tokens, each, rng)
        got = run(kernel, x, index, *parts, bias, out=(tokens, each, rows))
        expected = OPS.packed_routed_linear(x, index, parts, bias, fmt.name, columns, rows)
        assert relative_error(got, expected) < (TOLERANCE if fmt.integer_products else SPLIT), tokens
        assert bool((got[index < 0] == 0).all())
