"""Removing columns: against least squares, removal one by one, and the laws of refitting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import CompressorError
from compressor.numerics.sparsity.column_removal import choose_channels, refit_columns


def output_loss(error: torch.Tensor, hessian: torch.Tensor) -> float:
    return float((error.double() @ hessian.double() * error.double()).sum())


def problem(seed: int, out: int = 12, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(200, columns, generator=random) @ torch.randn(columns, columns, generator=random)
    return torch.randn(out, columns, generator=random), x, 2 / len(x) * x.t() @ x


@given(seed=st.integers(0, 99), count=st.integers(1, 23))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_refitting_is_least_squares_and_never_worse_than_leaving_out(seed: int, count: int) -> None:
    weight, x, hessian = problem(seed)
    kept = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    refitted = refit_columns(weight, hessian, kept)
    plain = torch.zeros_like(weight)
    plain[:, kept] = weight[:, kept]
    assert output_loss(weight - refitted, hessian) <= output_loss(weight - plain, hessian)
    assert not refitted[:, [i for i in range(24) if i not in kept]].any()
    best = torch.linalg.lstsq(x[:, kept].double(), (x @ weight.t()).double()).solution.t()
    exact = torch.zeros_like(weight, dtype=torch.float64)
    exact[:, kept] = best
    norm = output_loss(weight, hessian)
    assert output_loss(weight - refitted, hessian) <= output_loss(weight - exact, hessian) + 2e-3 * norm


def test_what_obs_predicts_is_what_removal_costs() -> None:
    """The first removal of eight, by the plainest definition: each column left out in turn, the others refitted."""
    weight, _, hessian = problem(3)
    columns = torch.arange(24)[:, None]
    kept = choose_channels(weight, hessian, columns, 23, "obs")
    losses = []
    for left_out in range(24):
        others = torch.tensor([i for i in range(24) if i != left_out])
        losses.append(output_loss(weight - refit_columns(weight, hessian, others), hessian))
    (gone,) = set(range(24)) - set(kept.tolist())
    assert gone == min(range(24), key=losses.__getitem__)


@pytest.mark.parametrize("importance", ["obs", "activation", "magnitude"])
def test_channels_of_several_columns_and_dead_ones(importance: str) -> None:
    weight, _, hessian = problem(5)
    columns = torch.arange(24).view(2, 12).t()  # channel c has the columns c and c + 12
    weight[:, columns[[2, 7]].flatten()] *= 1e-3
    kept = choose_channels(weight, hessian, columns, 10, importance)  # type: ignore[arg-type]
    assert kept.tolist() == [0, 1, 3, 4, 5, 6, 8, 9, 10, 11]
    dead = hessian.clone()
    dead[columns[4], :], dead[:, columns[4]] = 0.0, 0.0
    if importance != "magnitude":
        assert 4 not in choose_channels(weight, dead, columns, 9, importance)  # type: ignore[arg-type]


def test_a_better_choice_loses_less_than_a_worse_one() -> None:
    lost = {"obs": 0.0, "activation": 0.0, "magnitude": 0.0}
    for seed in range(20):
        weight, _, hessian = problem(seed)
        for importance in lost:
            kept = choose_channels(weight, hessian, torch.arange(24)[:, None], 16, importance)  # type: ignore[arg-type]
            error = weight - refit_columns(weight, hessian, kept)
            lost[importance] += output_loss(error, hessian) / output_loss(weight, hessian)
    assert lost["obs"] < lost["activation"] and lost["obs"] < lost["magnitude"]


def test_a_hessian_that_is_not_one_is_refused() -> None:
    weight, _, hessian = problem(1)
    with pytest.raises(CompressorError, match="not positive definite"):
        refit_columns(weight, -hessian, torch.arange(12))
