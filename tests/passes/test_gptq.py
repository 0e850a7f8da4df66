"""GPTQ against the sequential definition in float64, its law, and the pass on a tiny model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize, unpack
from compressor.numerics.grids import choose_grid, grid_values, round_to_grid, tensor_scale
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.obs import match_dense
from compressor.numerics.range_search import search_grid
from compressor.passes.gptq import Observer, gptq_quantize

FORMATS = ["W4A16_G32", "W3A16_G32", "W4A16_ASYM_G32", "W2A16_G64", "W8A8", "W4A16_C", "W4A16_ASYM_T", "W6A16_G16"]
FORMATS += ["FP6_E3M2_G32", "FP4_E2M1_G32", "FP8_E4M3", "NF4_G32", "MXFP4", "NVFP4"]


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make a weight and the Hessian of correlated inputs of uneven size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mix
    inputs *= torch.rand(columns, generator=generator) + 0.1
    return weight, 2 / len(inputs) * inputs.T @ inputs


def sequential(
    weight: Tensor, hessian: Tensor, fmt: Format, actorder: bool, static: bool, damp: float, mse: bool
) -> Tensor:
    """Follow the definition: columns one by one; what is left of H is inverted anew for every column (OBS, eq. 2)."""
    unit = tensor_scale(weight, fmt)
    W = weight.double() if unit is None else weight.double() / unit.double()
    weight = weight if unit is None else weight / unit
    H, Q = hessian.double(), torch.zeros_like(weight, dtype=torch.uint8)
    H = H + damp * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    order = sorted(range(len(H)), key=lambda q: -float(hessian[q, q])) if actorder else list(range(len(H)))
    size, grids, W = fmt.columns(len(H)), {}, W.clone()
    for n, q in enumerate(order):
        group, source = q // size, weight if static else W
        if group not in grids:
            part = slice(group * size, (group + 1) * size)
            chosen, diagonal = source[:, part].float(), hessian.diagonal()[part]
            grids[group] = search_grid(chosen, diagonal, fmt) if mse else choose_grid(chosen, fmt)
        F = order[n:]  # q first, then the columns that are still free
        Hinv = torch.linalg.inv(H[F][:, F])
        Q[:, q : q + 1] = round_to_grid(W[:, q : q + 1], *grids[group], fmt)
        error = W[:, q] - grid_values(Q[:, q : q + 1], *grids[group], fmt)[:, 0].double()
        W[:, F] -= torch.outer(error / Hinv[0, 0], Hinv[0])
    return Q


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("actorder", "static"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("columns", "observer"), [(64, "mse"), (76, "minmax"), (76, "mse")])
def test_codes_equal_the_sequential_definition(
    name: str, actorder: bool, static: bool, columns: int, observer: Observer
) -> None:
    fmt = Format.parse(name)
    weight, hessian = problem(12, columns, seed=columns)
    packed, info = gptq_quantize(
        weight, hessian, fmt, actorder=actorder, static_groups=static, observer=observer, blocksize=40
    )
    assert info.method == "gptq"
    expected = sequential(weight, hessian, fmt, actorder, static, 0.01, observer == "mse")
    assert torch.equal(unpack(packed)[0], expected)


@pytest.mark.parametrize("blocksize", [1, 7, 32, 100, 1000])
@pytest.mark.parametrize("name", ["W4A16_G32", "W4A16_C"])
def test_the_block_size_changes_nothing(blocksize: int, name: str) -> None:
    weight, hessian = problem(8, 100)
    results = [
        gptq_quantize(weight, hessian, Format.parse(name), actorder=False, static_groups=False, blocksize=size)[0]
        for size in (128, blocksize)
    ]
    assert torch.equal(results[0].parts["codes"], results[1].parts["codes"])
    assert torch.equal(results[0].parts["scales"], results[1].parts["scales"])


def loss(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    difference = weight.double() - values.double()
    return float(((difference @ hessian.double()) * difference).sum())


@given(
    name=st.sampled_from(FORMATS),
    columns=st.integers(1, 70),
    rank=st.integers(0, 70),
    power=st.integers(-12, 12),
    spread=st.integers(0, 6),
    dead=st.integers(0, 3),
    damp=st.sampled_from([0.0, 1e-8, 0.01, 1.0]),
    actorder=st.booleans(),
    static=st.booleans(),
    observer=st.sampled_from(["minmax", "mse"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_adversarial_inputs_give_finite_values_and_no_more_error_than_rtn(
    name: str,
    columns: int,
    rank: int,
    power: int,
    spread: int,
    dead: int,
    damp: float,
    actorder: bool,
    static: bool,
    observer: Observer,
    seed: int,
) -> None:
    fmt = Format.parse(name)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator)
    weight *= 10.0 ** torch.randint(-spread, spread // 2 + 1, (columns,), generator=generator)
    weight[:, : dead // 2] = 0
    inputs = torch.randn(rank, columns, generator=generator) * 10.0**power
    inputs *= 10.0 ** torch.randint(-spread, spread + 1, (columns,), generator=generator)
    inputs[:, :dead] = 0
    hessian = inputs.T @ inputs
    packed, info = gptq_quantize(
        weight,
        hessian,
        fmt,
        actorder=actorder and static,
        static_groups=static,
        dampening_frac=damp,
        observer=observer,
    )
    values = dequantize(packed)
    assert torch.isfinite(values).all()
    rtn_loss = loss(weight, dequantize(rtn_quantize(weight, fmt)), hessian)
    assert loss(weight, values, hessian) <= rtn_loss * (1 + 1e-9) + 1e-300
    assert info.error <= info.rtn_error


def test_error_is_well_below_rtn_and_act_order_helps_on_uneven_inputs() -> None:
    weight, hessian = problem(64, 128)
    fmt = Format.parse("W3A16_G128")
    plain = gptq_quantize(weight, hessian, fmt, actorder=False)[1]
    ordered = gptq_quantize(weight, hessian, fmt, actorder=True)[1]
    assert ordered.error < plain.error < 0.8 * plain.rtn_error


def test_dampening_raises_itself_when_the_factorisation_fails() -> None:
    weight, _ = problem(4, 32)
    hessian = torch.ones(32, 32)  # rank 1
    packed, info = gptq_quantize(weight, hessian, Format.parse("W4A16_G32"), dampening_frac=0.0)
    assert info.dampening_frac > 0
    assert info.error <= info.rtn_error
    assert torch.isfinite(dequantize(packed)).all()


def test_inputs_that_are_never_active_keep_their_rounded_weights() -> None:
    weight, hessian = problem(4, 64)
    hessian[:, 5], hessian[5] = 0, 0
    fmt = Format.parse("W4A16_G32")
    packed, info = gptq_quantize(weight, hessian, fmt)
    assert info.dead_columns == 1
    codes, scales, _ = unpack(packed)
    assert torch.equal(codes[:, 5:6], round_to_grid(weight[:, 5:6], scales[:, 0], None, fmt))


def test_act_order_with_grids_chosen_on_the_way_is_refused() -> None:
    weight, hessian = problem(4, 64)
    with pytest.raises(UsageError, match="static_groups"):
        gptq_quantize(weight, hessian, Format.parse("W4A16_G32"), actorder=True, static_groups=False)


def test_a_hessian_that_overflowed_is_refused() -> None:
    weight, hessian = problem(4, 64)
    hessian[0, 0] = float("inf")
    with pytest.raises(CompressorError, match="Hessian"):
        gptq_quantize(weight, hessian, Format.parse("W4A16_G32"))


def test_matching_the_dense_outputs_is_least_squares() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 16, generator=generator)
    dense = torch.randn(500, 16, generator=generator)
    inputs = dense + 0.3 * torch.randn(500, 16, generator=generator)
    hessian, cross = 2 / 500 * inputs.T @ inputs, 2 / 500 * (dense - inputs).T @ inputs
    matched = match_dense(weight, hessian, cross)
    level = 0.1 * hessian.diagonal().mean()  # a ridge towards the weight itself
    ridge = (500 / 2 * level).sqrt() * torch.eye(16)
    rows, targets = torch.cat([inputs, ridge]), torch.cat([dense @ weight.T, ridge @ weight.T])
    torch.testing.assert_close(matched, torch.linalg.lstsq(rows, targets).solution.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(match_dense(weight, hessian, torch.zeros(16, 16)), weight)
