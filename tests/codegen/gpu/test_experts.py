"""Routed linears on a CPU in lockstep, against the eager operators: formats, ragged shapes, experts without a token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from kernel_cases import OPS, SPLIT, TOLERANCE, check_special, random_packed, relative_error, special_rows
from lockstep import build, run
from tvm.script import tirx as T

from compressor.codegen.gpu.experts.kernel import dense_routed_linear, packed_routed_linear
from compressor.codegen.gpu.experts.order import Order, sort_pairs
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear.weights import parameter
from compressor.formats.format import Format

EXPERTS = 5
SMALL = Schedule(Streaming(4, 8, 2), *[Streaming(2, 8, 2)] * 2, *[Tiling(1, 1, 2, 1, 2, 2, 1)] * 2)
MANY = 90  # pairs: more than an expert's blocks of few tokens take


def routes(tokens: int, each: int, rng: torch.Generator, absent: int = -1) -> torch.Tensor:
    """Choose different experts for each token, never the third; ``absent`` in the place of some."""
    some = torch.tensor([0, 1, 3, 4])
    index = torch.stack([some[torch.randperm(4, generator=rng)[:each]] for _ in range(tokens)])
    return torch.where((index == 4) & (torch.arange(tokens)[:, None] % 2 == 1), absent, index)


def random_experts(fmt: Format, rows: int, columns: int, rng: torch.Generator) -> list[torch.Tensor]:
    """Return the stacked parts of all experts' weights; each has its own calibrated scale, where there is one."""
    weights = [random_packed(fmt, rows, columns, rng) for _ in range(EXPERTS)]
    if "input_scale" in weights[0].parts:
        weights = [w.with_input_scale(torch.tensor([0.02 + 0.01 * e])) for e, w in enumerate(weights)]
    return [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]


@pytest.mark.parametrize(
    "name", ["W4A16_G64", "W3A8_ASYM_G128", "W8A8_STATIC", "BIP2A8_G128", "BAL2A8_C", "MXFP4", "FP8_E4M3_B32",
             "W4A8_G64_AG64"],
)  # fmt: skip
def test_packed_routed_linear(name: str) -> None:
    pick, rng = random.Random(name), torch.Generator().manual_seed(1)
    fmt, each, own_rows = Format.parse(name), pick.choice([1, 2, 3]), pick.random() < 0.5
    rows, columns, has_bias = pick.choice([16, 40, 33]), pick.randint(64, 150), pick.random() < 0.5
    parts, routing = random_experts(fmt, rows, columns, rng), Routing(EXPERTS, each, own_rows)
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    kernel = build(packed_routed_linear(routing, rows, columns, fmt, has_bias, SMALL))
    close = TOLERANCE if fmt.integer_products else SPLIT
    for tokens in (1, 11, MANY // each):
        x = torch.randn(routing.inputs(tokens, columns), generator=rng)
        index = routes(tokens, each, rng)
        got = run(kernel, x, index, *parts, bias, out=(tokens, each, rows))
        expected = OPS.packed_routed_linear(x, index, parts, bias, fmt.name, columns, rows)
        assert relative_error(got, expected) < close, tokens
        assert bool((got[index < 0] == 0).all())
    x, index = special_rows(columns, rng)[0], torch.tensor([[0], [3], [1], [0], [4], [3]]).repeat(1, each)
    x = x[:, None].expand(-1, each, -1).contiguous() if own_rows else x
    for count in (len(x), 1):
        x, index = x[:count], index[:count]
        got = run(kernel, x, index, *parts, bias, out=(count, each, rows))
        expected = OPS.packed_routed_linear(x, index, parts, bias, fmt.name, columns, rows)
        given = x if own_rows else x[:, None].expand(-1, each, -1)
        check_special(got, expected, SPLIT, name, given)


def test_a_token_gets_the_same_bits_beside_any_others() -> None:
    rng, fmt, routing = torch.Generator().manual_seed(2), Format.parse("W4A16_G32"), Routing(EXPERTS, 2, False)
    parts = random_experts(fmt, 32, 64, rng)
    kernel = build(packed_routed_linear(routing, 32, 64, fmt, False, SMALL))
    x, index = torch.randn(MANY // 2, 64, generator=rng), routes(MANY // 2, 2, rng)
    together = run(kernel, x, index, *parts, out=(MANY // 2, 2, 32))
    turned = run(kernel, x.flip(0), index.flip(0), *parts, out=(MANY // 2, 2, 32))
    assert torch.equal(together, turned.flip(0))
    some = run(kernel, x[:9], index[:9], *parts, out=(9, 2, 32))
    assert torch.equal(some[3:], run(kernel, x[3:9], index[3:9], *parts, out=(6, 2, 32)))


@pytest.mark.parametrize(("kind", "own_rows"), [(torch.float32, 1), (torch.float16, 0), (torch.bfloat16, 0)], ids=str)
def test_dense_routed_linear(kind: torch.dtype, own_rows: int) -> None:
    rng, routing = torch.Generator().manual_seed(3), Routing(EXPERTS, 2, bool(own_rows))
    rows, columns, has_bias = 21, (45, 48)[own_rows], bool(own_rows)
    weight = torch.randn(EXPERTS, rows, columns, generator=rng).to(kind)
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    storage = {torch.bfloat16: "uint16"}.get(kind, str(kind).removeprefix("torch."))
    kernel = build(dense_routed_linear(routing, rows, columns, storage, has_bias))
    for tokens in (1, 7, MANY // 2):
        x, index = torch.randn(routing.inputs(tokens, columns), generator=rng), routes(tokens, 2, rng)
        got = run(kernel, x, index, weight, bias, out=(tokens, 2, rows))
        assert relative_error(got, OPS.routed_linear(x, index, weight, bias)) < SPLIT


def test_indices_outside_the_experts_read_nothing() -> None:
    """Wild ones as well as -1: the outputs are zeros, by every kernel."""
    rng, fmt, routing = torch.Generator().manual_seed(5), Format.parse("W8A8"), Routing(EXPERTS, 2, False)
    parts = random_experts(fmt, 16, 64, rng)
    kernel = build(packed_routed_linear(routing, 16, 64, fmt, False, SMALL))
    dense = build(dense_routed_linear(routing, 16, 64, "float32", False))
    weight = torch.randn(EXPERTS, 16, 64, generator=rng)
    for tokens in (1, 3, MANY // 2):
        x, index = torch.randn(tokens, 64, generator=rng), routes(tokens, 2, rng)
        index[0, 1], index[-1, 0] = EXPERTS, -(1 << 40) + 3
        for func, stored in ((kernel, parts), (dense, [weight])):
            got = run(func, x, index, *stored, out=(tokens, 2, 16))
            assert bool((got[(index < 0) | (index >= EXPERTS)] == 0).all()) and bool(torch.isfinite(got).all())


def sorting(experts: int, width: int) -> tvm.tirx.PrimFunc:
    """Sort pairs into buffers that come from outside."""
    sort = sort_pairs(experts, width)

    def declared(pairs: Any) -> Order:
        return Order(*(parameter(size, "int32") for size in Order.sizes(experts, pairs, width)))

    @T.prim_func(s_tir=True, private=True)
    def kernel():
        pairs = T.int64()
        chosen = T.meta_var(parameter((pairs,), "int64"))
        into = T.meta_var(declared(pairs))
        sort(chosen, pairs, into)

    return kernel


@pytest.mark.parametrize(("pairs", "width"), [(1, 8), (700, 16), (40, 64)])
def test_pairs_are_sorted_whatever_memory_held(pairs: int, width: int) -> None:
    chosen = np.random.default_rng(pairs).integers(-1, EXPERTS + 1, pairs)
    chosen[chosen == 2] = 3
    expected = [np.flatnonzero(chosen == e) for e in range(EXPERTS)]
    blocks = [-(-len(found) // width) for found in expected]
    owner, order = np.full(pairs // width + EXPERTS, -1), np.full((pairs // width + EXPERTS) * width, 7)
    owner[: sum(blocks)], slot_of = np.repeat(np.arange(EXPERTS), blocks), np.full(pairs, -1)
    for e, found in enumerate(expected):
        first = width * sum(blocks[:e])
        order[first : first + width * blocks[e]] = -1
        order[first : first + len(found)], slot_of[found] = found, first + np.arange(len(found))
    given = (np.full(n, 7, np.int32) for n in (EXPERTS, len(owner), len(order), pairs))
    _, counts, *got = build(sorting(EXPERTS, width))(chosen, *given)
    assert counts.tolist() == [len(found) for found in expected]
    for ours, right in zip(got, (owner, order, slot_of), strict=True):
        assert ours.tolist() == right.tolist()
