"""Which blocks are left out, and what becomes of the others: against plain definitions, and laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning_problems import problem
from torch import Tensor

from compressor.errors import CompressorError
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.numerics.sparsity.block_sparsity import (
    dampened_factor,
    largest_blocks,
    refitted,
    round_kept,
    surgeon_blocks,
)

WIDE = ColumnBlocks(50, 4)


def loss(weight: Tensor, other: Tensor, hessian: Tensor) -> float:
    difference = (weight - other).double()
    return float(((difference @ hessian.double()) * difference).sum())


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(3, 40), st.booleans(), st.integers(0, 99))
def test_the_largest_blocks_of_each_tile(rows: int, columns: int, by_inputs: bool, seed: int) -> None:
    weight, hessian = problem(rows, columns, seed)
    count = max(1, columns // 3)
    kept = largest_blocks(weight, hessian if by_inputs else None, count)
    for tile, part in enumerate(weight.split(16)):
        size = [
            float(sum(w**2 for w in part[:, c])) * (float(hessian[c, c]) if by_inputs else 1) for c in range(columns)
        ]
        assert sorted(range(columns), key=lambda c: -size[c])[:count] == pytest.approx(
            sorted(kept[tile].tolist(), key=lambda c: -size[c])
        )


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 99))
def test_the_largest_blocks_of_pairs_of_tiles(rows: int, count: int, seed: int) -> None:
    weight, hessian = problem(rows, 40, seed)
    kept = largest_blocks(weight, hessian, 4 * count, WIDE)
    assert kept.shape == (-(-rows // 16), 4 * count)
    for tile in range(len(kept)):
        pair = weight[32 * (tile // 2) : 32 * (tile // 2 + 1)].double().square() * hessian.diagonal().double()
        size = {b: float(pair[:, 4 * b : 4 * b + 4].sum()) for b in range(10)}
        best = sorted(sorted(size, key=lambda b: -size[b])[:count])
        assert kept[tile].tolist() == [4 * b + i for b in best for i in range(4)]


def surgeon(weight: Tensor, hessian: Tensor, count: int, blocksize: int, width: int = 1) -> Tensor:
    """Remove columns of one tile as SparseGPT's definition says: by inverses of what is left, one after another.

    ``width`` neighbours go together.
    """
    H = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    W, columns, kept = weight.double().clone(), len(hessian), []
    alone = (W.square().sum(0) / torch.linalg.inv(H).diagonal()).view(-1, width).sum(1)
    first_choice = set(alone.topk(count // width).indices.tolist())
    for first in range(0, columns, blocksize):
        block = range(first, min(first + blocksize, columns))
        quota = len(first_choice & {c // width for c in block})
        diagonal = {c: torch.linalg.inv(H[c:, c:])[0, 0] for c in block}
        cost = dict.fromkeys((c // width for c in block), 0.0)
        for c in block:
            cost[c // width] += float(W[:, c].square().sum() / diagonal[c])
        chosen = sorted(cost, key=lambda b: -cost[b])[:quota]
        stay = [b * width + i for b in chosen for i in range(width)]
        kept += stay
        for c in block:
            if c not in stay:  # the columns after it make up for it
                inverse = torch.linalg.inv(H[c:, c:])
                W[:, c:] -= W[:, c, None] / inverse[0, 0] * inverse[0]
    return torch.tensor(sorted(kept))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.integers(4, 36), st.sampled_from([4, 8, 128]), st.integers(0, 99))
def test_sparsegpt_against_its_definition(rows: int, columns: int, blocksize: int, seed: int) -> None:
    weight, hessian = problem(rows, columns, seed)
    count = max(1, columns // 3)
    kept = surgeon_blocks(weight, dampened_factor(hessian, 0.01)[0], count, blocksize)
    for tile, part in enumerate(weight.split(16)):
        assert torch.equal(kept[tile], surgeon(part, hessian, count, blocksize))


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 70), st.integers(2, 7), st.sampled_from([4, 8, 128]), st.integers(0, 99))
def test_sparsegpt_of_wide_blocks_against_its_definition(rows: int, blocks: int, blocksize: int, seed: int) -> None:
    weight, hessian = problem(rows, 4 * blocks, seed)
    kept = surgeon_blocks(weight, dampened_factor(hessian, 0.01)[0], 4 * (blocks // 2), blocksize, WIDE)
    for tile in range(len(kept)):
        part = weight[32 * (tile // 2) : 32 * (tile // 2 + 1)]
        assert torch.equal(kept[tile], surgeon(part, hessian, 4 * (blocks // 2), blocksize, 4))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 16), st.integers(4, 40), st.floats(0, 1), st.integers(0, 99))
def test_refitting_never_raises_the_loss(rows: int, columns: int, damp: float, seed: int) -> None:
    weight, hessian = problem(rows, columns, seed)
    kept = largest_blocks(weight[:16], hessian, max(1, columns // 2))[0]
    H, plain = hessian.double(), torch.zeros(rows, columns, dtype=torch.float64)
    plain[:, kept] = weight.double()[:, kept]
    found = plain.clone()
    factor = dampened_factor(H[kept][:, kept], damp)[0]
    found[:, kept] = refitted(weight.double(), H, kept, factor)
    best = plain.clone()
    best[:, kept] = weight.double() @ H[:, kept] @ torch.linalg.pinv(H[kept][:, kept], hermitian=True)
    floor, got, before = (loss(weight, each, hessian) for each in (best, found, plain))
    assert got <= before * (1 + 1e-9) and got >= floor * (1 - 1e-6)
    if damp == 0:
        assert got == pytest.approx(floor, rel=1e-6)


@pytest.mark.parametrize("name", ["W8A16_B16x1@50", "W4A16_ASYM_G16_B16x1@75", "NF4_G64_B16x1@50"])
def test_what_is_stored_is_near_the_refitted_weight(name: str) -> None:
    fmt, (weight, hessian) = Format.parse(name), problem(37, 96, 5)
    kept = largest_blocks(weight, hessian, fmt.stored_columns(96))
    packed, damp = round_kept(weight, hessian, kept, fmt, 0.01)
    dense = dequantize(packed)
    mask = torch.zeros(3, 96, dtype=torch.bool).scatter_(1, kept, True).repeat_interleave(16, dim=0)[:37]
    assert not bool(dense[~mask].any()) and packed.nbytes == fmt.packed_bytes(37, 96) and damp == 0.01
    H = hessian.double()
    exact = torch.cat([
        refitted(rows, H, columns, dampened_factor(H[columns][:, columns], 0.01)[0])
        for rows, columns in zip(weight.double().split(16), kept, strict=True)
    ])  # fmt: skip
    whole = torch.zeros(37, 96, dtype=torch.float64).masked_scatter_(mask, exact)
    floor, got = loss(weight, whole, hessian), loss(weight, dense, hessian)
    steps = {"W8A16_B16x1@50": 0.01, "W4A16_ASYM_G16_B16x1@75": 0.2, "NF4_G64_B16x1@50": 0.4}
    assert floor <= got <= floor * (1 + steps[name])
    unfitted = loss(weight, dequantize(round_kept(weight, hessian, kept, fmt, 0.01, refit=False)[0]), hessian)
    assert got < unfitted


def test_dampening_is_raised_where_the_hessian_is_not_definite() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).double()
    factor, damp = dampened_factor(x.T @ x, 0.0)
    assert damp >= 1e-4 and bool(torch.isfinite(factor).all())
    with pytest.raises(CompressorError, match="not positive definite"):
        dampened_factor(torch.tensor([[1.0, 1e3], [1e3, 1.0]]), 0.0)
