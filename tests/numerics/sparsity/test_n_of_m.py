"""N of every M, and single weights: exact counts, SparseGPT against a sequential reference, losses that never rise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning_problems import problem

from compressor.formats.extras import KeptOfGroup, SingleZeros
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.products.deterministic import quadratic
from compressor.numerics.sparsity.block_sparsity import dampened_factor, without_dead
from compressor.numerics.sparsity.n_of_m import (
    alps_entries,
    largest_entries,
    left_entries,
    only_kept_entries,
    round_entries,
    surgeon_entries,
)

DAMP = 0.01


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 20), st.integers(1, 12), st.sampled_from([(2, 4), (1, 4), (3, 4), (4, 8), (1, 3)]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_counts_and_losses(rows: int, groups: int, given_pattern: tuple[int, int], seed: int) -> None:
    pattern = KeptOfGroup(*given_pattern)
    weight, hessian = problem(rows, groups * pattern.size, seed)
    weight[:, ::3] = weight[:, :1].clone()  # equal weights
    R, damp = dampened_factor(hessian, DAMP)
    W, H = weight.double(), hessian.double()
    masks = {
        "magnitude": largest_entries(weight, None, pattern),
        "wanda": largest_entries(weight, hessian, pattern),
        "sparsegpt": surgeon_entries(weight, R, pattern),
        "alps": alps_entries(weight, hessian, R, pattern, damp),
    }
    losses = {}
    for name, kept in masks.items():
        assert bool((kept.view(rows, -1, pattern.size).sum(-1) == pattern.kept).all())
        refitted = only_kept_entries(W, R, H, kept, refit=True)
        plain, losses[name] = quadratic(W - W * kept, H), float(quadratic(W - refitted, H))
        assert losses[name] <= float(plain) * (1 + 1e-9) + 1e-12
        assert not bool(refitted[~kept].any())
        assert torch.equal(left_entries(W * kept, pattern).logical_or(W * kept == 0), torch.ones_like(kept))  # type: ignore[union-attr]
    assert losses["alps"] <= losses["sparsegpt"] * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 20), st.integers(1, 150), st.sampled_from([1.0, 50.0, 70.0, 99.0]), st.integers(0, 2**31))
def test_single_weights_counts_and_losses(rows: int, columns: int, percent: float, seed: int) -> None:
    single, (weight, hessian) = SingleZeros(percent), problem(rows, columns, seed)
    weight[:, ::3] = weight[:, :1].clone()  # equal weights
    R, damp = dampened_factor(hessian, DAMP)
    W, H, count = weight.double(), hessian.double(), single.kept(rows, columns)
    masks = {
        "magnitude": largest_entries(weight, None, single),
        "wanda": largest_entries(weight, hessian, single),
        "sparsegpt": surgeon_entries(weight, R, single),
        "alps": alps_entries(weight, hessian, R, single, damp),
    }
    losses = {}
    for name, kept in masks.items():
        assert int(kept.sum()) == count
        refitted = only_kept_entries(W, R, H, kept, refit=True)
        plain, losses[name] = quadratic(W - W * kept, H), float(quadratic(W - refitted, H))
        assert losses[name] <= float(plain) * (1 + 1e-9) + 1e-12
        assert not bool(refitted[~kept].any())
        assert torch.equal(left_entries(W * kept, single).logical_or(W * kept == 0), torch.ones_like(kept))  # type: ignore[union-attr]
    assert losses["alps"] <= losses["sparsegpt"] * (1 + 1e-9) + 1e-12
    by_row = masks["wanda"].sum(1)  # rows keep as many, but for what does not divide
    assert int(by_row.max() - by_row.min()) <= 1
    if count < weight.numel():
        assert float(weight[masks["magnitude"]].abs().min()) >= float(weight[~masks["magnitude"]].abs().max())
    assert left_entries(torch.ones(rows, columns), single) is None or count == rows * columns


def test_single_weights_of_dead_columns_go_first() -> None:
    """Columns that no input reaches lose all their weights, however large those are, and nothing becomes NaN."""
    (weight, hessian), single, dead = problem(20, 90, 3), SingleZeros(50), torch.arange(0, 90, 3)
    hessian[dead], hessian[:, dead], weight[:, dead] = 0, 0, 100
    R, damp = dampened_factor(hessian, DAMP)
    alive = without_dead(weight, hessian)
    for kept in (
        largest_entries(weight, hessian, single),
        surgeon_entries(alive, R, single),
        alps_entries(alive, hessian, R, single, damp),
    ):
        assert int(kept.sum()) == single.kept(20, 90) and not bool(kept[:, dead].any())
        values = dequantize(round_entries(weight, hessian, R, kept, Format.parse("W8A16_B1x1@50"), refit=True))
        assert bool(torch.isfinite(values).all()) and not bool(values[~kept].any())


def test_sparsegpt_chooses_single_weights_among_128_columns() -> None:
    """Its algorithm 1 with H^-1 of the columns that are left; all rows together choose among a block's columns."""
    columns, rows, single = 150, 3, SingleZeros(60)
    weight, hessian = problem(rows, columns, 7)
    R, damp = dampened_factor(hessian, DAMP)
    found = surgeon_entries(weight, R, single)
    raised = hessian.double() + damp * torch.diagonal(hessian).double().mean() * torch.eye(columns)
    W, mask = weight.double().clone(), torch.zeros(rows, columns, dtype=torch.bool)
    counts = {0: -(-180 * 128 // 150), 128: 180 - -(-180 * 128 // 150)}  # of 450 weights, 40% stay
    for i in range(columns):
        inverse = torch.linalg.inv(raised[i:, i:])
        if i in counts:
            block = range(i, min(i + 128, columns))
            of_each = {
                (row, j): float(W[row, j] ** 2 / torch.linalg.inv(raised[j:, j:])[0, 0])
                for j in block
                for row in range(rows)
            }
            for place in sorted(of_each, key=lambda place: -of_each[place])[: counts[i]]:
                mask[place] = True
        for row in range(rows):
            if not mask[row, i]:
                W[row, i:] -= W[row, i] / inverse[0, 0] * inverse[0]
    assert torch.equal(mask, found)


@pytest.mark.parametrize(("kept", "size"), [(2, 4), (1, 4), (1, 3)])
def test_sparsegpt_one_column_after_another(kept: int, size: int) -> None:
    """Its algorithm 1 with H^-1 of the columns that are left, one row at a time; groups of 3 straddle 128 columns."""
    columns = 3 * 4 * 13
    weight, hessian = problem(3, columns, 7)
    R, damp = dampened_factor(hessian, DAMP)
    found = surgeon_entries(weight, R, KeptOfGroup(kept, size))
    raised = hessian.double() + damp * torch.diagonal(hessian).double().mean() * torch.eye(columns)
    for row, expected in zip(weight.double().clone(), found, strict=True):
        mask = torch.zeros(columns, dtype=torch.bool)
        for i in range(columns):
            inverse = torch.linalg.inv(raised[i:, i:])
            if i % size == 0:
                of_each = [float(row[j] ** 2 / torch.linalg.inv(raised[j:, j:])[0, 0]) for j in range(i, i + size)]
                best = sorted(range(size), key=lambda j: -of_each[j])[:kept]
                mask[[i + j for j in best]] = True
            if not mask[i]:
                row[i:] -= row[i] / inverse[0, 0] * inverse[0]
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("name", [
    "W8A16_2:4", "W4A16_G32_2:4", "W4A16_C_1:4", "W8A16_B1x1@50", "W4A16_ASYM_G32_B1x1@70", "NVFP4_B1x1@60",
])  # fmt: skip
@pytest.mark.parametrize("refit", [True, False])
def test_rounding_keeps_the_pattern_and_pays(name: str, refit: bool) -> None:
    fmt, (weight, hessian) = Format.parse(name), problem(20, 128, 3)
    pattern = fmt.extra(KeptOfGroup) or fmt.extra(SingleZeros)
    assert pattern is not None
    R, _ = dampened_factor(hessian, DAMP)
    kept = largest_entries(weight, hessian, pattern)
    stored = round_entries(weight, hessian, R, kept, fmt, refit=refit)
    W, H, values = weight.double(), hessian.double(), dequantize(stored).double()
    assert stored.format == fmt and not bool(values[~kept].any())
    target = only_kept_entries(W, R, H, kept, refit=refit)
    if isinstance(pattern, SingleZeros):
        plain = dequantize(rtn_quantize(target.float(), fmt.of_kept)).double() * kept
    else:
        places = kept.nonzero()[:, 1].view(len(W), -1)
        nearest = dequantize(rtn_quantize(target.gather(1, places).float(), fmt.of_kept)).double()
        plain = torch.zeros_like(W).scatter(1, places, nearest)
    assert float(quadratic(W - values, H)) <= 1.02 * float(quadratic(W - plain, H))
