"""Rows have the same bits alone and with others in WebAssembly too, and tokens of a tree those of single tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import normal, random_packed
from token_trees import path_to, random_trees
from torch import Tensor

from compressor.codegen.isa import INDEPENDENT_ROWS
from compressor.codegen.kernels import dense as dense_linear
from compressor.codegen.kernels import norm
from compressor.codegen.kernels.attention import cached, tree
from compressor.codegen.kernels.experts import Routing, packed_routed_linear
from compressor.codegen.kernels.linear.packed import Schedule, fused_linear
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.web import wasm
from compressor.codegen.web.execute_wasm import WasmProgram
from compressor.codegen.web.simd128 import SIMD128
from compressor.formats.format import Format

COUNTS = (2, 3, 5, 8, 16, 17, 31, INDEPENDENT_ROWS)
COLUMNS = 136
CASES: list[tuple[str, Prologue | None, bool, bool]] = [  # format, prologue, residual, bias
    ("W8A8", Prologue("rms_norm", eps=1e-6), True, True),
    ("W4A8_ASYM_G32", Prologue("layer_norm", eps=1e-5, has_bias=True), False, True),
    ("W4A16_G32", Prologue("silu", gated=True), True, False),
    ("NVFP4", None, True, True),
]


@pytest.fixture(autouse=True)
def linker(require_tool: Callable[[str], Path]) -> None:
    require_tool("wasm-ld")


class Kernels:
    """Functions in one module, called with tensors, then sizes; the last buffer is the output, or NaN."""

    def __init__(self, **functions: Any) -> None:
        module = wasm.WasmModule(SIMD128)
        for name, func in functions.items():
            module.add(func, name)
        self._program = WasmProgram({"scratch": []}, module.link(), {})

    def __call__(self, name: str, given: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
        nothing = np.full(shape, np.nan, np.float32)
        addresses = [self._program.upload(x) for x in (*(x.contiguous().numpy() for x in given), nothing)]
        self._program.call(name, addresses, sizes)
        found = self._program.read(addresses[-1], "float32", shape)
        for address in addresses:
            self._program.free(address)
        return torch.from_numpy(found)


def check_rows(rows: Callable[[int, int], Tensor]) -> None:
    """Compare rows alone with the same rows among others, bit for bit; ``rows`` computes those from one to another."""
    alone = torch.cat([rows(i, i + 1) for i in range(INDEPENDENT_ROWS)])
    assert not alone.isnan().any()
    for count in COUNTS:
        first = INDEPENDENT_ROWS - count
        got, expected = (x.view(torch.int32) for x in (rows(first, first + count), alone[first : first + count]))
        assert torch.equal(got, expected), (count, int((got != expected).sum()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_rows_of_linears(case: tuple[str, Prologue | None, bool, bool]) -> None:
    name, prologue, residual, bias = case
    rng, fmt, width = torch.Generator().manual_seed(1), Format.parse(name), 32
    packed = random_packed(fmt, width, COLUMNS, rng)
    ends = {"prologue": prologue, "has_residual": residual}
    kernels = Kernels(linear=fused_linear([width], COLUMNS, fmt, bias, SIMD128, Schedule(1, 1, 2), **ends))
    inputs, vectors = (1, 0) if prologue is None else (prologue.inputs, prologue.vectors)
    x = [torch.randn(1, INDEPENDENT_ROWS, COLUMNS, generator=rng) for _ in range(inputs)]
    added = [torch.randn(1, INDEPENDENT_ROWS, width, generator=rng)] if residual else []
    fixed = [torch.randn(COLUMNS, generator=rng) for _ in range(vectors)] + list(packed.parts.values())
    fixed += [torch.randn(width, generator=rng)] if bias else []

    def rows(begin: int, end: int) -> Tensor:
        given = [*(y[:, begin:end] for y in x), *fixed, *(y[:, begin:end] for y in added)]
        return kernels("linear", given, [1, end - begin], (1, end - begin, width))[0]

    check_rows(rows)


def test_rows_of_dense_linears_norms_and_experts() -> None:
    rng, fmt, routing = torch.Generator().manual_seed(3), Format.parse("W4A16_G32"), Routing(4, 2, False)
    each = [random_packed(fmt, 32, COLUMNS, rng) for _ in range(4)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in each), strict=True)]
    kernels = Kernels(
        dense=dense_linear.dense_linear(21, COLUMNS, "float32", True, dense_linear.Schedule(4, 2, 2)),
        norm=norm.norm(COLUMNS, 1e-5, True, True),
        experts=packed_routed_linear(routing, 32, COLUMNS, fmt, False, SIMD128, Schedule(1, 1, 2)),
    )
    x = torch.randn(1, INDEPENDENT_ROWS, COLUMNS, generator=rng)
    index = torch.stack([torch.randperm(4, generator=rng)[:2] for _ in range(INDEPENDENT_ROWS)])
    fixed = {
        "dense": [normal(21, COLUMNS, seed=2), normal(21, seed=3)],
        "norm": [normal(COLUMNS, seed=4), normal(COLUMNS, seed=5)],
    }
    for name, width in (("dense", 21), ("norm", COLUMNS)):
        check_rows(
            lambda a, b, name=name, width=width: kernels(  # type: ignore[misc]
                name, [x[:, a:b], *fixed[name]], [1, b - a], (1, b - a, width)
            )[0]
        )
    check_rows(lambda a, b: kernels("experts", [x[0, a:b], index[a:b], *parts], [b - a], (b - a, 2, 32)))


def test_a_token_of_a_tree_has_the_bits_of_a_token_alone() -> None:
    heads, kv_heads, width, capacity = 6, 2, 12, 40
    settings = (heads, kv_heads, width, 0.3, 9, 2.0, False)
    kernels = Kernels(tree=tree.tree_attention(*settings), alone=cached.cached_attention(*settings))
    trees = random_trees(random.Random(width), (5, 0, 17), (4, 3, 6))
    position, parent, slot, row = trees
    tokens = len(position)
    q = normal(1, heads, tokens, width, seed=4) * 4
    k, v = normal(1, kv_heads, tokens, width, seed=5), normal(1, kv_heads, tokens, width, seed=6)
    caches = [normal(3, kv_heads, capacity, width, seed=seed) for seed in (7, 8)]
    got = kernels("tree", [q, k, v, *caches, *trees], [tokens, 3, capacity], (1, tokens, heads, width))
    for cache, new in zip(caches, (k, v), strict=True):
        cache[slot, :, row] = new[0].transpose(0, 1)
    for t in range(tokens):
        path = path_to(parent.tolist(), t)
        base, rows = int(position[path[0]]), row[path].tolist()
        held = [cache[slot[t] : slot[t] + 1].clone() for cache in caches]
        for cache, whole in zip(held, caches, strict=True):
            cache[:, :, base : base + len(rows)] = whole[slot[t] : slot[t] + 1, :, rows]
        own = [x[:, :, t : t + 1] for x in (q, k, v)]
        one = kernels("alone", [*own, *held, position[t : t + 1]], [1, 1, capacity], (1, 1, heads, width))
        assert torch.equal(one[0, 0], got[0, t]), t
