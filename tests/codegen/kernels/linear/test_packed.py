"""Every kernel family against the eager reference of its operator: all formats, ragged shapes, both instruction sets.

A kernel for an instruction set that this machine lacks is skipped with the reason.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    OPS,
    TOLERANCE,
    WIDTHS,
    build,
    check_packed_linear,
    check_special,
    executes,
    random_packed,
    relative_error,
    run,
    special_norm,
    special_rows,
    tolerance,
)

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import activations, embedding, norm, vector
from compressor.codegen.kernels import dense as dense_linear
from compressor.codegen.kernels.convolution import patches
from compressor.codegen.kernels.linear import bit_planes
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.formats.activations import Activations
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import pack
from compressor.formats.rounded_activations import round_activations
from compressor.formats.weights import BlockScales, ChannelScales, GroupScales, Integers, TensorScale
from compressor.ops.patches import outputs


@pytest.mark.parametrize("isa", [x86.AMX, *WIDTHS], ids=lambda isa: isa.name)
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_linear(bits: int, activation_bits: int, isa: Isa) -> None:
    pick = random.Random(f"{bits} {activation_bits} {isa.name}")
    rng = torch.Generator().manual_seed(bits)
    size = pick.choice([32, 64])
    scales = pick.choice([TensorScale(), ChannelScales(), GroupScales(size), BlockScales(size)])
    fmt = Format(Integers(bits, pick.random() < 0.5), scales, Activations() if activation_bits == 8 else None)
    check_packed_linear(fmt, isa, pick, rng)


def on_widths(names: list[str]) -> list[tuple[str, Isa]]:
    """Pair all names with the widest registers, and every third with the others: how a format is read is the same."""
    widest, *others = WIDTHS
    return [*((name, widest) for name in names), *((name, isa) for isa in others for name in names[::3])]


@pytest.mark.parametrize(("name", "isa"), on_widths([
    "FP8_E4M3", "FP8_E5M2_G64", "FP6_E3M2_G32", "FP6_E2M3", "FP4_E2M1_G32", "FP4_E1M2_C", "FP4_E3M0_T", "FP5_E2M2_C",
    "FP7_E3M3_G32", "FP3_E1M1_G32", "NF4_G64", "NF4_C", "NVFP4", "MXFP4", "MXFP6_E3M2", "MXFP8_E5M2",
    "LUT2", "LUT3", "LUT4", "LUT3_G64", "LUT3_S0.45", "W4A16_G32_S1", "W3A8_C_S10", "NVFP4_S0.5",
    "W8A8_F3", "W4A16_ASYM_G32_F1", "W4A8_ASYM_G64_S2_F8", "FP8_E4M3_B32", "W4A8_ASYM_B32_AG64", "W2A16_B16_S1",
]), ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_packed_linear_of_floats_tables_and_codebooks(name: str, isa: Isa) -> None:
    pick = random.Random(f"{name} {isa.name}")
    check_packed_linear(Format.parse(name), isa, pick, torch.Generator().manual_seed(len(name)))


BLOCKS = [
    "W8A8_B16x1@80", "W4A8_ASYM_G32_B16x1@50", "W4A16_G32_B16x1@70", "W3A16_ASYM_C_B16x1@30", "FP6_E3M2_B16x1@95",
    "LUT4_G32_B16x1@60", "MXFP4_B16x1@33.5", "W8A8_STATIC_B16x1@50", "W2A16_G16_B16x1@99",
    "W8A8_B32x64@60", "W4A16_G64_B32x64@50",
]  # fmt: skip


@pytest.mark.parametrize(("name", "isa"), [
    *((name, isa) for isa in (x86.AMX, x86.AVX512_VPOPCNTDQ) for name in BLOCKS), *on_widths(BLOCKS[::2])
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_blocks_of_columns_that_are_left_out(name: str, isa: Isa) -> None:
    pick = random.Random(f"{name} {isa.name}")
    check_packed_linear(Format.parse(name), isa, pick, torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("isa", [x86.AVX512_VPOPCNTDQ, *WIDTHS], ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", ["W8A8_B16x1@80", "W8A16_B16x1@80"])
def test_wrong_bits_write_nothing_outside(name: str, isa: Isa) -> None:
    """A tile that says that it keeps all columns, or none, has wrong outputs; other tiles have right ones."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    packed, x = random_packed(fmt, 48, 200, rng), torch.randn(1, 3, 200, generator=rng)
    kernel = build(packed_linear.packed_linear(48, 200, fmt, False, isa, packed_linear.Schedule(1, 1, 2)), isa)
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 200, 48)
    for wrong in (255, 0):
        packed.parts["kept"][1] = wrong
        for tokens in (1, 3):
            got = run(kernel, x[:, :tokens], *packed.parts.values(), out=(1, tokens, 48))
            rows = torch.tensor([*range(16), *range(32, 48)])
            assert relative_error(got[..., rows], expected[:, :tokens, rows]) < TOLERANCE


PLAIN = Isa("plain", 4, "haswell", ("avx2", "fma", "f16c"))
"""Four lanes, as NEON has, and no instruction of its own."""


@pytest.mark.parametrize("name", ["W4A8_G32", "W8A8", "W4A16_ASYM_G32", "NF4_G64", "BIP2A8_G128"])
def test_a_machine_without_instructions_of_its_own_gets_plain_expressions(name: str) -> None:
    fmt = Format.parse(name)
    schedule = packed_linear.Schedule(1, 1, 4)
    script = packed_linear.packed_linear(32, 256, fmt, True, PLAIN, schedule).script()
    assert "llvm" not in re.sub(r'T\.call_llvm_pure_intrin\("\w+", "llvm\.fmuladd"', "", script)  # all machines have it
    check_packed_linear(fmt, PLAIN, random.Random(name), torch.Generator().manual_seed(1))


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from([isa for isa in x86.ISAS.values() if executes(isa)]),
    st.randoms(use_true_random=False),
    st.integers(0, 99),
)
def test_packed_linear_of_any_preset_and_shape(name: str, isa: Isa, pick: random.Random, seed: int) -> None:
    """Other ones in every run, with the tuner's schedules; the tests around this one look at the same each time."""
    check_packed_linear(Format.parse(name), isa, pick, torch.Generator().manual_seed(seed), is_small=False)


@pytest.mark.of_x86
@pytest.mark.parametrize("isa", WIDTHS, ids=lambda isa: isa.name)
def test_small_buffers_take_no_calls(isa: Isa) -> None:
    """What TVM allots by a call is in no register: only buffers whose size depends on the tokens are allotted."""

    def calls(func: tvm.tirx.PrimFunc) -> int:
        module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
        code: str = tvm.compile(module, target=X86().tvm_target(isa)).mod.inspect_source("ll")
        return code.count("load ptr, ptr @__TVMBackendAllocWorkspace")

    assert calls(norm.norm(64, 1e-6, True, True)) == 0
    assert calls(dense_linear.dense_linear(32, 64, "float32", False, dense_linear.gemm_space(8)[0])) == 0
    fmt = Format.parse("W4A8_G32")
    schedule = packed_linear.gemm_space(4, 4, fmt, isa)[0]
    dynamic = 3  # activations, their sums, their scales
    assert calls(packed_linear.packed_linear(64, 64, fmt, True, isa, schedule)) == dynamic


@pytest.mark.parametrize(("name", "isa", "counted"), [
    ("BIP1A1_G32", x86.AVX512_VNNI, True), ("BIP2A2_C", x86.AVX512_VNNI, True),
    ("BAL1A2_G32", x86.AVX2, True), ("BIP2A4_C", x86.AVX512_VPOPCNTDQ, True),
    ("BIP5A2_G32", x86.AVX512_VPOPCNTDQ, True), ("BIP4A4_C", x86.AVX2, False),
    ("BIP7A8_G32", x86.AVX512_VNNI, False), ("BIP8A5_C", x86.AVX512_VNNI, False),
    ("BAL1A1_C", x86.AVX512_VNNI, False), ("BAL2A6_C", x86.AVX512_VNNI, False),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_products_of_bit_planes_are_exact(name: str, isa: Isa, counted: bool) -> None:
    """Scales of one and integers in: the sums are exact, and so the outputs, by the plainest definition in numpy."""
    fmt, pick = Format.parse(name), random.Random(f"{name} {isa.name}")
    assert (bit_planes.supports(fmt, isa) == "") == counted and fmt.activations is not None
    rng = torch.Generator().manual_seed(len(name))
    still = replace(fmt, activations=Activations(fmt.activations.bits, granularity="tensor"))
    rows, columns, top = pick.randint(1, 40), pick.randint(33, 150), int(fmt.activations.max_value)
    codes = torch.randint(fmt.levels, (rows, columns), generator=rng, dtype=torch.uint8)
    packed = pack(codes, torch.ones(rows, fmt.groups(columns)), None, still).with_input_scale(torch.ones(1))
    kernel = build(packed_linear.packed_linear(rows, columns, still, False, isa, packed_linear.Schedule(1, 1, 2)), isa)
    for tokens in (1, 3):
        x = torch.randint(-top, top + 1, (1, tokens, columns), generator=rng)
        x = torch.where(x < 0, -1, 1) if fmt.activations.is_sign else x
        expected = x.double().numpy() @ (codes.double().numpy() - (fmt.levels - 1) / 2).T
        assert np.array_equal(run(kernel, x.float(), *packed.parts.values(), out=(1, tokens, rows)), expected)


@pytest.mark.parametrize(("name", "isa"), [
    ("BIP1A1_C_AG32", x86.AVX512_VNNI), ("BIP1A16_C", x86.AVX512_VNNI),
    ("W8A8_ASYM_STATIC", x86.AVX2), ("W8A5_ASYM_AG32", x86.AVX512_VNNI),
    *((name, isa) for name in ("W4A4_G32_AG64", "NVFP4_ANVFP4") for isa in WIDTHS),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_packed_linear_of_rounded_activations(name: str, isa: Isa) -> None:
    """The ways that scales of activations reach outputs; what rounding does to them is the next test's."""
    pick = random.Random(f"{name} {isa.name}")
    check_packed_linear(Format.parse(name), isa, pick, torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize(("name", "isa", "index"), [
    *(("W4A8_G32", x86.AVX512_VNNI, i) for i in range(5)), *(("W4A16_G32", x86.AVX512_VNNI, i) for i in (0, 4)),
    ("W4A8_G32", x86.AVX2, 0), ("W4A16_G32", x86.AVX2, 0),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_every_schedule_of_the_packed_linear_agrees(name: str, isa: Isa, index: int) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    rows, columns = 128, 96
    gemv, gemm = packed_linear.gemv_space(8, fmt, isa), packed_linear.gemm_space(8, 4, fmt, isa)  # ARM has two
    schedule = replace(gemm[index % len(gemm)], gemv_tiles=gemv[index % len(gemv)].gemv_tiles)
    packed = random_packed(fmt, rows, columns, rng)
    kernel = build(packed_linear.packed_linear(rows, columns, fmt, False, isa, schedule), isa)
    for tokens in (1, 5, 16):
        x = torch.randn(1, tokens, columns, generator=rng)
        got = run(kernel, x, *packed.parts.values(), out=(1, tokens, rows))
        expected = OPS.packed_linear(x, list(packed.parts.values()), None, name, columns, rows)
        assert relative_error(got, expected) < tolerance(fmt, isa, tokens)


def test_integer_sums_do_not_saturate() -> None:
    """The largest codes against the largest activations, where a 16-bit intermediate would overflow."""
    for isa in x86.ISAS.values():
        for bits in (7, 8):
            fmt = Format(Integers(bits, symmetric=False), ChannelScales(), Activations())
            codes = torch.full((16, 64), fmt.levels - 1, dtype=torch.uint8)
            packed = pack(codes, torch.ones(16, 1).half(), torch.zeros(16, 1, dtype=torch.uint8), fmt)
            schedule = packed_linear.Schedule(1, 1, 2)
            kernel = build(packed_linear.packed_linear(16, 64, fmt, False, isa, schedule), isa)
            x = torch.ones(1, 1, 64)
            got = run(kernel, x, *packed.parts.values(), out=(1, 1, 16))
            assert relative_error(got, torch.full((1, 1, 16), 64.0 * (fmt.levels - 1))) < TOLERANCE


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "has_bias"), [(40, 172, True), (37, 64, False), (1, 5, True)])
def test_dense_linear(storage: torch.dtype, rows: int, columns: int, has_bias: bool) -> None:
    rng = torch.Generator().manual_seed(rows)
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "uint16"}
    weight = torch.randn(rows, columns, generator=rng).to(storage)
    bias = torch.randn(rows, generator=rng) if has_bias else None
    for isa in WIDTHS:
        for schedule in dense_linear.gemm_space(dense_linear.gemv_space()[1].gemv_rows)[:2]:
            kernel = build(dense_linear.dense_linear(rows, columns, names[storage], has_bias, schedule), isa)
            for batch, tokens in [(1, 1), (2, 3), (1, 16)]:
                x = torch.randn(batch, tokens, columns, generator=rng)
                got = run(kernel, x, weight, bias, out=(batch, tokens, rows))
                assert relative_error(got, OPS.dense_linear(x, weight, bias)) < TOLERANCE
            x = special_rows(columns, rng)
            got = run(kernel, x, weight, bias, out=(1, x.shape[1], rows))
            check_special(got, OPS.dense_linear(x, weight, bias), TOLERANCE, (rows, columns, isa.name), x)


@settings(deadline=None, max_examples=3)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 35),
    *[st.tuples(st.integers(low, high), st.integers(low, high)) for low, high in ((1, 3), (1, 3), (0, 2), (1, 2))],
)  # fmt: skip
def test_patches(
    batch: int, height: int, width: int, channels: int,
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
) -> None:  # fmt: skip
    """Ragged images, every geometry: a gather is exact."""
    geometry = (kernel, stride, padding, dilation)
    assume(all(outputs(n, *g) > 0 for n, *g in zip((height, width), *geometry, strict=True)))
    x = torch.randn(batch, height, width, channels, generator=torch.Generator().manual_seed(channels))
    expected = OPS.patches(x, *geometry)
    got = run(build(patches.patches(channels, *geometry), x86.AVX2), x, out=tuple(expected.shape))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("width", [8, 64, 172, 2048])
def test_norms(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    weight, bias = torch.randn(width, generator=rng), torch.randn(width, generator=rng)
    rms = build(norm.norm(width, 1e-5, False, False), x86.AVX2)
    layer = build(norm.norm(width, 1e-5, True, True), x86.AVX2)
    for tokens in (1, 3, 40):
        x = torch.randn(2, tokens, width, generator=rng) * 5 + 1
        assert relative_error(run(rms, x, weight, out=x.shape), OPS.rms_norm(x, weight, 1e-5)) < TOLERANCE
        expected = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5)
        assert relative_error(run(layer, x, weight, bias, out=x.shape), expected) < TOLERANCE
    x = special_rows(width, rng)
    check_special(run(rms, x, weight, out=x.shape), special_norm(x, weight, None, False), TOLERANCE, "rms_norm")
    expected = special_norm(x, weight, bias, True)
    check_special(run(layer, x, weight, bias, out=x.shape), expected, TOLERANCE, "layer_norm")


def test_embedding() -> None:
    table = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 49, 7], [3, 3, 1]])
    kernel = build(embedding.embedding(50, 24, "uint16"), x86.AVX2)
    assert torch.equal(run(kernel, table, ids, out=(2, 3, 24)), table.float()[ids])


def test_exponential_is_within_two_units_in_the_last_place() -> None:
    from tvm.script import tirx as T

    every = T.ramp(0, 1, 16)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, y_: T.handle) -> None:
        n = T.int64()
        x = T.match_buffer(x_, (n, 16), "float32")
        y = T.match_buffer(y_, (n, 16), "float32")
        for i in range(n):
            y[i, every] = vector.exp(x[i, every], 16)

    x = torch.linspace(-86.9, 87.9, 160000).view(-1, 16)
    got = run(build(kernel, x86.AVX2), x, out=tuple(x.shape)).double()
    expected = x.double().exp()
    assert float(((got - expected) / expected).abs().max()) < 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", [
    "1", "4", "8", "FP8_E4M3", "FP8_E5M2", "FP6_E2M3", "FP6_E3M2", "FP4_E2M1", "FP4_E1M2", "FP5_E2M2", "MXFP4",
    "MXFP8_E5M2", "NVFP4",
])  # fmt: skip
def test_activations_are_rounded_to_the_same_bits(name: str) -> None:
    """Scale, and numbers a register and one at a time, of rows of 16; ties among them."""
    from tvm.script import tirx as T

    act = Activations.parse(name, "_AG16" if name[0] in "148F" else None)
    assert act is not None
    every = T.ramp(0, 1, 16)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, top_: T.handle, y_: T.handle) -> None:
        n = T.int64()
        x = T.match_buffer(x_, (n, 16), "float32")
        top = T.match_buffer(top_, (n,), "float32")
        y = T.match_buffer(y_, (n, 32), "float32")
        for i in range(n):
            scale = T.alloc_buffer((1,), "float32")
            scale[0] = activations.span_scale(top[i], act, T.float32(0.03))
            inverse = T.meta_var(activations.inverse_scale(scale[0]))
            y[i, every] = activations.on_grid(x[i, every], inverse, act, 16) * T.broadcast(scale[0], 16)
            for j in range(16):
                y[i, 16 + j] = activations.on_grid(x[i, j], inverse, act, 1) * scale[0]

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=rng) * torch.logspace(-32, 3, 400, 10.0)[:, None]
    x[200:] = torch.randint(-64, 65, (200, 16), generator=rng) / 8.0  # ties and values of the grid
    x[200:, 0] = act.max_value * torch.pow(2.0, torch.randint(-3, 4, (200,), generator=rng))
    x[7] = 0.0
    expected = round_activations(x, act, torch.tensor([0.03]))
    top = x.abs().mean(1) if act.is_sign else x.abs().amax(1)
    got = run(build(kernel, x86.AVX2), x, top, out=(400, 32))
    assert torch.equal(got[:, :16], expected) and torch.equal(got[:, 16:], expected)
    assert bool(torch.isfinite(expected).all()) and float((expected != 0).float().mean()) > 0.4
