"""Experts in WGSL against the eager operators: ragged shapes, experts without a token, pairs without an expert."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import OPS, random_packed
from torch import Tensor
from web_formats import TOLERANCE, error

from compressor.codegen.kernels.experts import Routing
from compressor.codegen.web.execute_webgpu import run_kernels
from compressor.codegen.web.kernels import dense_linear, experts
from compressor.codegen.web.kernels.activations import Rounded, round_activations
from compressor.codegen.web.kernels.packed_linear import packed_linear, stored_parts
from compressor.formats.format import Format

EXPERTS = 5
TOKENS = (1, 2, 3, 19)  # two kernels, and blocks that are not full


def routes(tokens: int, each: int, rng: torch.Generator) -> Tensor:
    """Choose experts for each token, the first for all, the third for none; no expert in some places."""
    some = torch.tensor([1, 3, 4])
    index = torch.stack([some[torch.randperm(3, generator=rng)[:each]] for _ in range(tokens)])
    index[:, 0] = 0
    return torch.where((index == 4) & (torch.arange(tokens)[:, None] % 2 == 1), -1, index)


def bound(x: Tensor) -> np.ndarray:
    x = x.contiguous().int() if x.dtype == torch.int64 else x.contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def sorted_pairs(index: Tensor) -> np.ndarray:
    kernel, pairs = experts.sort_pairs(EXPERTS, index.shape[1]), index.numel()
    (found,) = run_kernels(
        {kernel.name: kernel.record()}, [bound(index)], [len(index)], {1: ("uint32", (EXPERTS + 2 + 2 * pairs,))}
    )
    return found


def run(kernels: Any, given: list[Any], tokens: int, out: tuple[int, ...]) -> np.ndarray:
    few, many = kernels
    if "TILES" in many.constants:  # which a software adapter compiles in a fifth of the time
        many = dataclasses.replace(many, constants={"LANES": 2, "TILES": 2, "TOKENS": 3})
    records = {kernel.name: kernel.record() for kernel in (few, many)}
    outputs = {len(few.buffers) - 1: ("float32", out)}
    (found,) = run_kernels(records, [x for x in given if x is not None], [tokens], outputs)
    return found


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_pairs_are_sorted_by_expert_and_then_by_token(tokens: int, require_adapter: None) -> None:
    index = routes(tokens, 2, torch.Generator().manual_seed(0))
    found = sorted_pairs(index).astype(np.int64)
    group = np.where(index < 0, EXPERTS, index).reshape(-1)
    order = np.argsort(group, kind="stable")
    assert found[: EXPERTS + 2].tolist() == [int((group < e).sum()) for e in range(EXPERTS + 2)]
    assert np.array_equal(found[EXPERTS + 2 :], np.concatenate([order, group[order]]))


def test_choose(require_adapter: None) -> None:
    x = torch.randn(6, 13, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].round()  # ties: the first comes first
    x[2, 5], x[3, :], x[4, [2, 7]] = float("nan"), -float("inf"), float("nan")
    x[5, :6] = torch.tensor([0.0, -0.0, 0.0, -0.0, 1e-40, -1.0])
    kernel = experts.choose(13, 4)
    (found,) = run_kernels({kernel.name: kernel.record()}, [x.numpy()], [6], {1: ("int32", (6, 4))})
    assert np.array_equal(found, OPS.top_k(x, 4).numpy())


@pytest.mark.parametrize(
    "name",
    ["W4A16_G32", "W3A16_ASYM_G32", "W8A8_STATIC", "W4A8_ASYM_G32", "NF4_G64", "NVFP4_ANVFP4", "LUT3", "FP8_E4M3_B32"],
)
def test_packed_routed_linear(name: str, require_adapter: None) -> None:
    pick, rng, fmt = random.Random(name), torch.Generator().manual_seed(1), Format.parse(name)
    own_rows, each = pick.random() < 0.5, pick.choice([1, 2, 3])
    rows, columns, has_bias = pick.choice([16, 40]), pick.randint(64, 150), pick.random() < 0.5
    weights = [random_packed(fmt, rows, columns, rng) for _ in range(EXPERTS)]
    if "input_scale" in weights[0].parts:
        weights = [w.with_input_scale(torch.tensor([0.02 + 0.01 * e])) for e, w in enumerate(weights)]
    parts = {part: torch.stack([w.parts[part] for w in weights]) for part in weights[0].parts}
    bias = torch.randn(EXPERTS, rows, generator=rng) if has_bias else None
    routing = Routing(EXPERTS, each, own_rows)
    for tokens in TOKENS:
        x, index = torch.randn(routing.inputs(tokens, columns), generator=rng), routes(tokens, each, rng)
        inputs, of_pairs = rounded(fmt, routing, x, index, parts)
        kernels = packed_linear(rows, columns, fmt, has_bias, Routing(EXPERTS, each, of_pairs))
        given = [*inputs, sorted_pairs(index), *(bound(parts[part]) for part in stored_parts(fmt))]
        got = run(kernels, [*given, None if bias is None else bound(bias)], tokens, (tokens, each, rows))
        expected = OPS.packed_routed_linear(x, index, list(parts.values()), bias, fmt.name, columns, rows)
        assert error(got, expected) < TOLERANCE, tokens
        assert not got[index.numpy() < 0].any()


def test_of_the_weights_those_of_chosen_experts_are_read(require_adapter: None) -> None:
    fmt, rng, routing = Format.parse("W4A16_G32"), torch.Generator().manual_seed(1), Routing(EXPERTS, 2, False)
    weights = [random_packed(fmt, 16, 64, rng) for _ in range(EXPERTS)]
    parts = {part: torch.stack([w.parts[part] for w in weights]) for part in weights[0].parts}
    kernels = packed_linear(16, 64, fmt, False, routing)
    for index in (torch.tensor([[0, 3]]), torch.tensor([[3, 0]]).expand(5, 2)):
        x = torch.randn(len(index), 64, generator=rng)
        expected = OPS.packed_routed_linear(x, index, list(parts.values()), None, fmt.name, 64, 16)
        parts["scales"][[1, 2, 4]] = torch.nan
        given = [bound(x), sorted_pairs(index), *(bound(parts[part]) for part in stored_parts(fmt))]
        assert error(run(kernels, given, len(index), (*index.shape, 16)), expected) < TOLERANCE


def rounded(
    fmt: Format, routing: Routing, x: Tensor, index: Tensor, parts: dict[str, Tensor]
) -> tuple[list[np.ndarray], bool]:
    """Return what a routed linear reads in place of x, and whether that has a row for each pair."""
    if fmt.activations is None:
        return [bound(x)], routing.own_rows
    columns, has_scale = x.shape[-1], "input_scale" in parts
    kernel = round_activations(columns, fmt, routing if has_scale else None)
    count = index.numel() if has_scale else x.numel() // columns
    given = [bound(x), *([bound(parts["input_scale"]), bound(index)] if has_scale else [])]
    outputs = {len(given): ("float32", (count, columns))}
    if fmt.integer_products:
        layout = Rounded.of(columns, fmt)
        outputs = {len(given): ("int32", (count, layout.words)), len(given) + 1: ("float32", (count, layout.numbers))}
    return run_kernels({kernel.name: kernel.record()}, given, [count], outputs), has_scale or routing.own_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_routed_linear(dtype: torch.dtype, require_adapter: None) -> None:
    rng, own_rows = torch.Generator().manual_seed(3), dtype == torch.float16
    routing, rows, columns = Routing(EXPERTS, 2, own_rows), 21, 45
    weight = torch.randn(EXPERTS, rows, columns, generator=rng).to(dtype)
    bias = torch.randn(EXPERTS, rows, generator=rng) if own_rows else None
    kernels = dense_linear.dense_linear(rows, columns, str(dtype).removeprefix("torch."), own_rows, routing)
    for tokens in TOKENS:
        x, index = torch.randn(routing.inputs(tokens, columns), generator=rng), routes(tokens, 2, rng)
        given = [bound(x), sorted_pairs(index), bound(weight), None if bias is None else bound(bias)]
        got = run(kernels, given, tokens, (tokens, 2, rows))
        assert error(got, OPS.routed_linear(x, index, weight, bias)) < TOLERANCE, tokens
