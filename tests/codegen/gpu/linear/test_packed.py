"""The packed linear on a GPU, in lockstep, against the operator in PyTorch."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import lockstep
import pytest
import torch
import tvm
from kernel_cases import (
    OPS,
    SPLIT,
    TOLERANCE,
    check_special,
    random_packed,
    relative_error,
    special_rows,
    typical_output,
)
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from compressor.codegen.gpu.linear import kernel as kernels
from compressor.codegen.gpu.linear.kernel import Schedule
from compressor.codegen.gpu.linear.packed import fused_linear, packed_parts, supports
from compressor.codegen.gpu.linear.shares import Streaming, Tiling
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.formats.format import FORMATS as FORMATS_OF_ALL
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight

FORMATS = [
    "W4A16_G128", "W8A8", "W2A16_ASYM_G32", "W3A16_G64", "W5A16_ASYM_G128", "W4A16_ASYM_G32", "W8A8_ASYM",
    "W8A8_STATIC", "W6A8_ASYM_G64", "W4A4_G128_AG128", "W4A8_G192_AG192", "W8A8_B128", "BIP3A8_G128",
    "FP8_E5M2_AFP8_E5M2", "MXFP4_AMXFP4", "MXFP6_E2M3", "NVFP4_ANVFP4", "FP8_E4M3_AFP8_E4M3_STATIC",
    "NF4_G64",
]  # fmt: skip
KINDS = ("silu", "gelu_tanh", "relu", "rms_norm", "layer_norm")


def small_schedule(pick: random.Random) -> Schedule:
    """Return a schedule with more than one of everything, for small weights."""
    one = Streaming(pick.choice([1, 4]), pick.choice([1, 3, 9]), pick.choice([1, 4, 8]))
    few, some = (Streaming(2, pick.choice([2, 9]), pick.choice([2, 4]), n) for n in (1, pick.choice([2, 3])))
    many = Tiling(*(pick.choice([1, 2]) for _ in range(5)), pick.choice([2, 3]), pick.choice([1, 2]))
    return Schedule(one, few, some, many, many)


def outputs(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute the linear by the operator."""
    rows, columns = packed.shape
    result: Tensor = OPS.packed_linear(x, list(packed.parts.values()), bias, packed.format.name, columns, rows)
    return result


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    """All kinds of codes, scales and activations; one token, a few and many, of a ragged shape; special floats."""
    fmt, pick = Format.parse(name), random.Random(name)
    assert not supports(fmt)
    rng = torch.Generator().manual_seed(pick.randrange(1 << 30))
    rows, columns = pick.randint(1, 70), pick.randint(9, 600)
    packed = random_packed(fmt, rows, columns, rng)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    kernel = lockstep.build(fused_linear([rows], columns, fmt, bias is not None, small_schedule(pick)))
    for batch, tokens in [(1, 1), (1, 3), (3, 4), (1, 23)]:
        x = torch.randn(batch, tokens, columns, generator=rng)
        x[0, 0] *= 0.0 if tokens == 3 else 1.0  # a token of zeros has no scale
        got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(batch, tokens, rows))
        error = relative_error(got, outputs(x, packed, bias), typical_output(x, packed))
        assert error < (TOLERANCE if fmt.integer_products else SPLIT), (rows, columns, tokens)
    special = special_rows(columns, rng)
    for x in (special, special.repeat(1, 4, 1)):
        got = lockstep.run(kernel, x, *packed.parts.values(), bias, out=(1, x.shape[1], rows))
        check_special(got, outputs(x, packed, bias), SPLIT, (rows, columns), x)


def reference(prologue: Prologue, given: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """Compute a prologue by PyTorch."""
    if prologue.kind == "rms_norm":
        result: Tensor = OPS.rms_norm(given[0], vectors[0], prologue.eps)
        return result
    if prologue.kind == "layer_norm":
        return layer_norm(given[0], given[0].shape[-1:], *vectors, eps=prologue.eps)
    result = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh"), "relu": relu}[prologue.kind](given[0])
    return result * given[1] if prologue.gated else result


@pytest.mark.parametrize("kind", KINDS)
def test_prologues_and_residuals(kind: Any) -> None:
    """Activations that are computed where they are prepared, and outputs that are added to."""
    fmt = Format.parse("W8A8" if kind in ("silu", "layer_norm") else "W4A16_G64")
    pick, rng = random.Random(kind), torch.Generator().manual_seed(3)
    is_norm, columns = kind.endswith("norm"), pick.choice([200, 199])
    prologue = Prologue(kind, kind == "silu", 1e-5 if is_norm else 0.0, kind == "layer_norm")
    packed = random_packed(fmt, 40, columns, rng)
    func = fused_linear([40], columns, fmt, False, small_schedule(pick), prologue=prologue, has_residual=True)
    kernel = lockstep.build(func)
    for tokens in (1, 2, 9, 18):
        given = [torch.randn(1, tokens, columns, generator=rng) for _ in range(prologue.inputs)]
        vectors = [torch.randn(columns, generator=rng) for _ in range(prologue.vectors)]
        residual = torch.randn(1, tokens, 40, generator=rng)
        got = lockstep.run(kernel, *given, *vectors, *packed.parts.values(), residual, out=(1, tokens, 40))
        x = reference(prologue, given, vectors)
        # Sums in another order can bring an activation to the other side of a tie.
        close = SPLIT if fmt.activations is None else 2e-3
        assert relative_error(got, outputs(x, packed) + residual, typical_output(x, packed)) < close, tokens


@pytest.mark.parametrize(("name", "has_bias"), [("W4A16_ASYM_G64", True), ("W8A8", False)])
def test_several_weights(name: str, has_bias: bool) -> None:
    """Weights of different sizes share one launch."""
    fmt, pick, rng = Format.parse(name), random.Random(name), torch.Generator().manual_seed(5)
    rows, columns = [50, 16, 33], 260
    weights = [random_packed(fmt, n, columns, rng) for n in rows]
    biases = [torch.randn(n, generator=rng) if has_bias else None for n in rows]
    kernel = lockstep.build(fused_linear(rows, columns, fmt, has_bias, small_schedule(pick)))
    for tokens in (1, 5, 30):
        x = torch.randn(2, tokens, columns, generator=rng)[: 1 if tokens == 1 else 2]
        operands = [part for w, b in zip(weights, biases, strict=True) for part in (*w.parts.values(), b)]
        empty = [torch.full((*x.shape[:2], n), float("nan")) for n in rows]
        found = kernel(x, *operands, *empty)[-3:]
        for got, weight, bias in zip(found, weights, biases, strict=True):
            expected = outputs(x, weight, bias)
            assert relative_error(torch.from_numpy(got), expected, typical_output(x, weight)) < SPLIT, tokens


def test_schedules_of_the_spaces() -> None:
    """Each schedule that a tuner may choose gives the same numbers."""
    spaces = (
        kernels.one_token_space(), kernels.few_tokens_space(), kernels.some_tokens_space(),
        kernels.many_tokens_space(), kernels.most_tokens_space(),
    )  # fmt: skip
    fmt, rng = Format.parse("W4A16_G128"), torch.Generator().manual_seed(7)
    packed = random_packed(fmt, 80, 512, rng)
    for schedule in (Schedule(), Schedule(*(space[1] for space in spaces))):
        kernel = lockstep.build(fused_linear([80], 512, fmt, False, schedule))
        for tokens in (1, 9, 20, 200):
            x = torch.randn(1, tokens, 512, generator=rng)
            got = lockstep.run(kernel, x, *packed.parts.values(), out=(1, tokens, 80))
            assert relative_error(got, outputs(x, packed), typical_output(x, packed)) < SPLIT


@pytest.mark.parametrize(
    ("old", "new"),
    [("__syncthreads();", ";"), ("memcpy(&a, all + 64 * (4 * g + from)", "memcpy(&a, all + 64 * (4 * t + from)")],
)
def test_changes_are_seen(old: str, new: str) -> None:
    """Without a barrier there is a race, and with sums elsewhere numbers are wrong."""
    fmt, rng = Format.parse("W4A16_G128"), torch.Generator().manual_seed(9)
    packed, x = random_packed(fmt, 40, 256, rng), torch.randn(1, 1, 256, generator=rng)
    schedule = Schedule(Streaming(4, 9, 4))
    with lockstep.changed(old, new):
        kernel = lockstep.build(fused_linear([40], 256, fmt, False, schedule))
    try:
        got = lockstep.run(kernel, x, *packed.parts.values(), out=(1, 1, 40))
    except tvm.error.InternalError as error:
        assert "a race in shared memory" in str(error)
        return
    assert not relative_error(got, outputs(x, packed), typical_output(x, packed)) < SPLIT


def test_refuses() -> None:
    """Formats without kernels are refused with the reason."""
    for name, reason in [("LUT3", "tables"), ("W8A8_B16x1@80", "_B16x1@80")]:
        assert reason in supports(Format.parse(name))


@pytest.mark.parametrize("rows", [4096, 28672])
def test_every_block_fits_into_shared_memory(rows: int) -> None:
    """A format whose steps are wide fills more of it with each stage; three bits took 256 KiB of Hopper's 227."""
    for name, fmt in FORMATS_OF_ALL.items():
        if not supports(fmt):
            products, operands = packed_parts([rows], 4096, fmt, False, False)
            for tiling in Schedule().of_shape(rows // 16, products.fragments)[3:]:
                assert kernels.shared_bytes(kernels.fitting(products, operands, tiling)) <= 163 << 10, name
