"""ALPS: against its definition and the best choice there is; never above its start."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning_problems import problem
from torch import Tensor

from compressor.formats.extras import ColumnBlocks
from compressor.numerics.sparsity.alps import GROWTH, MOST, RHO, ROUNDS, admm_blocks, alps_blocks
from compressor.numerics.sparsity.block_sparsity import dampened_factor, largest_blocks, refitted, surgeon_blocks

WIDE = ColumnBlocks(50, 4)


def loss(weight: Tensor, hessian: Tensor, kept: Tensor, damp: float, refit: bool = True) -> float:
    """tr((W - D) H (W - D)^T), summed over tiles."""
    H, total = hessian.double(), 0.0
    for rows, columns in zip(weight.double().split(16), kept, strict=True):
        change = rows.clone()
        factor = dampened_factor(H[columns][:, columns], damp)[0]
        change[:, columns] -= refitted(rows, H, columns, factor) if refit else rows[:, columns]
        total += float(((change @ H) * change).sum())
    return total


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 70), st.integers(2, 8), st.booleans(), st.integers(0, 99))
def test_pairs_of_tiles_keep_the_same_and_never_end_above_their_start(
    rows: int, blocks: int, refit: bool, seed: int
) -> None:
    weight, hessian = problem(rows, 4 * blocks, seed)
    start = largest_blocks(weight, None, 4 * (blocks // 2), WIDE)
    found = alps_blocks(weight, hessian, start, 0.01, refit=refit, blocks=WIDE)
    assert torch.equal(found[: len(found) // 2 * 2 : 2], found[1::2])
    assert torch.equal(found[:, ::4] % 4, torch.zeros_like(found[:, ::4])) and bool((found.diff(dim=1) > 0).all())
    for pair in range(-(-len(found) // 2)):
        rows_of = weight[32 * pair : 32 * pair + 32]
        ends = [loss(rows_of, hessian, kept[2 * pair : 2 * pair + 2], 0.01, refit) for kept in (start, found)]
        assert ends[1] <= ends[0] * (1 + 1e-12)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.integers(4, 36), st.booleans(), st.booleans(), st.integers(0, 99))
def test_it_never_ends_above_its_start(rows: int, columns: int, by_size: bool, refit: bool, seed: int) -> None:
    weight, hessian = problem(rows, columns, seed)
    count = max(1, columns // 3)
    start = surgeon_blocks(weight, dampened_factor(hessian, 0.01)[0], count)
    start = largest_blocks(weight, None, count) if by_size else start
    found = alps_blocks(weight, hessian, start, 0.01, refit=refit)
    assert found.shape == start.shape and bool((found.diff(dim=1) > 0).all())
    ends = [loss(weight, hessian, kept, 0.01, refit) for kept in (start, found)]
    assert ends[1] <= ends[0] * (1 + 1e-12)


def admm(weight: Tensor, hessian: Tensor, start: Tensor) -> Tensor:
    """Go through the paper's rounds for one tile, by inverses."""
    H = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    size, V, rho = H.diagonal().sqrt(), torch.zeros(1, dtype=torch.float64), RHO
    H, W = H / size / size[:, None], weight.double() * size
    D, kept = torch.zeros_like(W), start
    D[:, start] = W[:, start]
    for _ in range(MOST):
        before = kept
        for _ in range(ROUNDS):
            near = (W @ H - V + rho * D) @ torch.linalg.inv(H + rho * torch.eye(len(H)))
            moved = near + V / rho
            kept = moved.square().sum(0).topk(len(start)).indices.sort().values
            D = torch.zeros_like(W)
            D[:, kept] = moved[:, kept]
            V = V + rho * (near - D)
        if torch.equal(before, kept):
            break
        rho *= GROWTH
    return kept


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 16), st.integers(4, 36), st.integers(0, 99))
def test_admm_against_its_definition(rows: int, columns: int, seed: int) -> None:
    weight, hessian = problem(rows, columns, seed)
    start = largest_blocks(weight, hessian, max(1, columns // 3))
    assert torch.equal(admm_blocks(weight.double(), hessian, start, 0.01)[0], admm(weight, hessian, start[0]))


def test_it_comes_nearer_to_the_best_choice_than_its_start() -> None:
    """Relative to SparseGPT's loss, which is 1: by at least two fifths of what the best of all choices wins."""
    best, found = 0.0, 0.0
    for seed in range(12):
        weight, hessian = problem(16, 9, seed)
        start = surgeon_blocks(weight, dampened_factor(hessian, 0.01)[0], 3)
        unit = 12 * loss(weight, hessian, start, 0.01)
        every = itertools.combinations(range(9), 3)
        best += min(loss(weight, hessian, torch.tensor([kept]), 0.01) for kept in every) / unit
        found += loss(weight, hessian, alps_blocks(weight, hessian, start, 0.01), 0.01) / unit
    assert best <= found <= 1 - 0.4 * (1 - best)


def test_threads_do_not_change_it() -> None:
    (weight, hessian), threads = problem(64, 96, 1), torch.get_num_threads()
    start, found = largest_blocks(weight, hessian, 24), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            found.append(alps_blocks(weight, hessian, start, 0.01))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_hessian_without_full_rank(tokens: int) -> None:
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens))
    hessian = 2 / tokens * x.T @ x
    hessian[5], hessian[:, 5] = 0.0, 0.0
    weight = torch.randn(20, 24, generator=torch.Generator().manual_seed(0))
    weight[:, 5] = 0.0
    found = alps_blocks(weight, hessian, largest_blocks(weight, hessian, 6), 0.1)
    assert found.shape == (2, 6) and not bool((found == 5).any())
