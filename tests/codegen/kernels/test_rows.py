"""A row has the same bits alone and with others, up to INDEPENDENT_ROWS: kernels of every family, bit for bit.

Where a machine cannot execute a kernel (AMX), the law rests on its code: sums of integers are exact, and of floats each
product that is added is one instruction with its sum, whatever surrounds it (:func:`left_to_llvm`).
"""

from __future__ import annotations

import re
from typing import Any

import emulated_arm
import numpy as np
import pytest
import torch
import tvm
from kernel_cases import build, normal, random_packed
from torch import Tensor, nn
from torch.export import Dim
from tvm import relax

from compressor.capture.capture import capture
from compressor.codegen import neon
from compressor.codegen.isa import INDEPENDENT_ROWS, Isa
from compressor.codegen.kernels import dense as dense_linear
from compressor.codegen.kernels import norm
from compressor.codegen.kernels.experts import Routing, packed_routed_linear
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.linear.packed import Schedule
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.kernels.n_of_m import n_of_m_linear
from compressor.codegen.kernels.skipping.linear import skipping_linear
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.formats.extras import KeptOfGroup, SkippedInputs
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, skip_inputs
from compressor.host.machine import host_flags

COUNTS = (2, 3, 5, 8, 16, 17, 31, INDEPENDENT_ROWS)
AVX2, VNNI, VPOPCNTDQ = x86.AVX2, x86.AVX512_VNNI, x86.AVX512_VPOPCNTDQ
NORM, CENTRED = Prologue("rms_norm", eps=1e-6), Prologue("layer_norm", eps=1e-5, has_bias=True)
GATED, GELU = Prologue("silu", gated=True), Prologue("gelu")
COLUMNS = 136


def outputs(kernel: Any, given: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Call a kernel; outputs come last, and are NaN where nothing was written."""
    found = [tvm.runtime.tensor(np.full(shape, np.nan, np.float32)) for shape in shapes]
    kernel(*(tvm.runtime.tensor(x.contiguous().numpy()) for x in given), *found)
    return [torch.from_numpy(y.numpy()) for y in found]


def check_rows(
    kernel: Any, tokens: list[Tensor], fixed: list[Tensor], widths: list[int], last: int = 0, most: int = 32
) -> None:
    """Compare rows alone with the same rows among others.

    Args:
        tokens: operands [1, T, .]; the last ``last`` of them come behind the fixed ones.
        most: rows of a call.
    """

    def rows(begin: int, end: int) -> Tensor:
        given = [x[:, begin:end] for x in tokens]
        first, behind = given[: len(given) - last], given[len(given) - last :]
        return torch.cat(outputs(kernel, [*first, *fixed, *behind], [(1, end - begin, n) for n in widths]), dim=-1)

    alone = torch.cat([rows(i, i + 1) for i in range(INDEPENDENT_ROWS)], dim=1)
    assert not alone.isnan().any()
    for count in (n for n in COUNTS if n <= most):
        for first in {0, INDEPENDENT_ROWS - count}:
            got, expected = (x.view(torch.int32) for x in (rows(first, first + count), alone[:, first : first + count]))
            assert torch.equal(got, expected), (count, first, int((got != expected).sum()))


def linear(fmt: Format, rows: list[int], bias: bool, isa: Isa, ends: dict[str, Any]) -> tvm.tirx.PrimFunc:
    """Write the kernel of a format, with a small block for more tokens."""
    if fmt.extra(KeptOfGroup) is not None:
        return n_of_m_linear(rows, COLUMNS, fmt, bias, isa, **ends)
    if fmt.extra(SkippedInputs) is not None:
        return skipping_linear(rows, COLUMNS, fmt, bias, isa, **ends)
    return packed_linear.fused_linear(rows, COLUMNS, fmt, bias, isa, Schedule(1, 1, 2), **ends)


def weights(name: str, rows: list[int], rng: torch.Generator) -> list[PackedWeight]:
    """Make random weights of a format."""
    if not name.endswith("_SKIP"):
        return [random_packed(Format.parse(name), n, COLUMNS, rng) for n in rows]
    limits = torch.rand(COLUMNS, generator=rng) / 2
    return [skip_inputs(random_packed(Format.parse(name.removesuffix("_SKIP")), n, COLUMNS, rng), limits) for n in rows]


def check_linear(
    name: str, isa: Isa, rows: list[int], prologue: Prologue | None, residual: bool, bias: bool, kernel: Any = None,
    most: int = INDEPENDENT_ROWS,
) -> None:  # fmt: skip
    """Check a linear's rows; ``kernel`` is compiled already where this machine lacks a part of the instruction set."""
    rng, packed = torch.Generator().manual_seed(1), weights(name, rows, torch.Generator().manual_seed(2))
    func = linear(packed[0].format, rows, bias, isa, {"prologue": prologue, "has_residual": residual})
    kernel = build(func, isa) if kernel is None else kernel(func)
    inputs, vectors = (1, 0) if prologue is None else (prologue.inputs, prologue.vectors)
    tokens = [torch.randn(1, INDEPENDENT_ROWS, COLUMNS, generator=rng) for _ in range(inputs)]
    fixed = [torch.randn(COLUMNS, generator=rng) for _ in range(vectors)]
    for weight in packed:
        fixed += [*weight.parts.values(), *([torch.randn(weight.shape[0], generator=rng)] if bias else [])]
    added = [torch.randn(1, INDEPENDENT_ROWS, rows[0], generator=rng)] if residual else []
    check_rows(kernel, [*tokens, *added], fixed, rows, len(added), most)


CASES: list[tuple[str, list[int], Prologue | None, bool, bool, list[Isa]]] = [
    # format, rows of each weight, prologue, residual, bias, and where its code differs from that of the others
    ("W8A8", [64], NORM, True, True, [AVX2, VNNI]),
    ("W8A8_P4", [48, 32], CENTRED, False, True, [VNNI]),
    ("W4A8_C_OF8", [48, 32], NORM, False, False, [VNNI]),
    ("W4A16_G32_OF8", [40], None, True, True, [VNNI]),
    ("W4A8_ASYM_G32", [48, 32], CENTRED, False, True, [AVX2, VNNI]),
    ("W4A16_G32", [40], GATED, True, False, [AVX2, VNNI]),
    ("W8A16_ASYM", [32], None, False, True, [VNNI]),
    ("W8A8_STATIC", [37], GELU, True, True, [VNNI]),
    ("W4A8_ASYM_B32_AG64", [64], None, False, False, [AVX2]),
    ("FP8_E4M3_AFP8_E4M3", [24], NORM, False, True, [AVX2]),
    ("NVFP4", [32], None, True, True, [AVX2]),
    ("LUT2", [16], None, False, True, [VNNI]),
    ("W4A16_G32_S1", [33], None, True, False, [AVX2]),
    ("W8A8_F3", [32], None, True, True, [VNNI]),
    ("W8A16_2:4", [40], NORM, True, True, [VNNI]),
    ("W8A16_SKIP", [40], GATED, True, True, [AVX2]),
    ("BIP1A1_G64", [32], NORM, False, True, [AVX2, VPOPCNTDQ]),
    ("W8A8_B16x1@60", [32], NORM, True, True, [VNNI, VPOPCNTDQ]),
    ("W4A16_ASYM_G32_B16x1@50", [40], None, False, True, [VNNI]),
    ("W8A8_B1x1@50", [32], None, True, True, [VPOPCNTDQ]),
]


@pytest.mark.parametrize(("case", "isa"), [
    pytest.param(case, isa, id=f"{case[0]}-{isa.name}") for case in CASES for isa in case[-1]
])  # fmt: skip
def test_rows_of_linears(case: tuple[str, list[int], Prologue | None, bool, bool, list[Isa]], isa: Isa) -> None:
    name, rows, prologue, residual, bias, _ = case
    check_linear(name, isa, rows, prologue, residual, bias)


@pytest.mark.of_x86
@pytest.mark.parametrize(("name", "most"), [
    ("W4A16_G32", INDEPENDENT_ROWS), ("FP6_E3M2_G32", INDEPENDENT_ROWS), ("W8A8_P4", 8),
])  # fmt: skip
def test_rows_take_vectors_where_amx_would_split_floats_or_unpack_codes(name: str, most: int) -> None:
    """Up to ``most`` rows no tile is touched, so that a CPU without AMX executes what was compiled for it."""
    if not host_flags().issuperset(flag for flag in x86.AMX.cpu_flags if not flag.startswith("amx")):
        pytest.skip("this machine lacks what the AMX kernels have besides tiles")

    def compiled(func: tvm.tirx.PrimFunc) -> Any:
        return module(func, x86.AMX)["kernel"]

    check_linear(name, x86.AMX, [32], NORM, True, True, compiled, most)


@pytest.mark.parametrize("isa", [AVX2, VNNI], ids=lambda isa: isa.name)
def test_rows_of_dense_linears_and_norms(isa: Isa) -> None:
    x = normal(1, INDEPENDENT_ROWS, COLUMNS, seed=1)
    weight, bias = normal(21, COLUMNS, seed=2), normal(21, seed=3)
    kernel = build(dense_linear.dense_linear(21, COLUMNS, "float32", True, dense_linear.gemm_space(8)[0]), isa)
    check_rows(kernel, [x], [weight, bias], [21])
    kernel = build(norm.norm(COLUMNS, 1e-5, True, True), isa)
    check_rows(kernel, [x], [normal(COLUMNS, seed=4), normal(COLUMNS, seed=5)], [COLUMNS])


@pytest.mark.parametrize(("name", "isa"), [("W4A8_G32", AVX2), ("W8A8_P4", AVX2), ("W4A16_G32", VNNI)])
def test_rows_of_routed_linears(name: str, isa: Isa) -> None:
    rng, fmt, routing = torch.Generator().manual_seed(3), Format.parse(name), Routing(4, 2, False)
    each = [random_packed(fmt, 32, COLUMNS, rng) for _ in range(4)]
    parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in each), strict=True)]
    kernel = build(packed_routed_linear(routing, 32, COLUMNS, fmt, False, isa, Schedule(1, 1, 2)), isa)
    x = torch.randn(INDEPENDENT_ROWS, COLUMNS, generator=rng)
    index = torch.stack([torch.randperm(4, generator=rng)[:2] for _ in range(INDEPENDENT_ROWS)])

    def rows(begin: int, end: int) -> Tensor:
        return outputs(kernel, [x[begin:end], index[begin:end], *parts], [(end - begin, 2, 32)])[0]

    alone = torch.cat([rows(i, i + 1) for i in range(INDEPENDENT_ROWS)])
    for count in COUNTS:
        assert torch.equal(rows(0, count), alone[:count]), count


class Chain(nn.Module):
    """Sums, differences and functions between linears, of widths with and without whole vectors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        turned = torch.cat([-x[..., 10:], x[..., :10]], -1)
        rotary = x * torch.cos(y) + turned * torch.sin(y)
        gated = nn.functional.silu(x) * y - torch.tanh(y) * x + nn.functional.gelu(x) * 0.3
        return rotary, gated, torch.softmax(x, -1), 1.7 - x * x, (x * y).sum(-1) - x.mean(-1) * 2


@pytest.mark.of_x86
@pytest.mark.parametrize("width", [20, 37])
def test_rows_of_what_lies_between_linears(width: int) -> None:
    sizes = ({1: Dim("rows", min=1)},) * 2
    graph = capture(Chain(), (torch.zeros(1, 5, width),) * 2, dynamic_shapes=sizes)
    library = compile_graph(graph, X86(), tune="off")
    assert not [found for code in sources(library.executable.mod) for found in left_to_llvm(code)]
    vm, given = relax.VirtualMachine(library.executable, tvm.cpu()), [normal(1, 32, width, seed=s) for s in (1, 2)]

    def rows(begin: int, end: int) -> list[Tensor]:
        found = vm["main"](*(tvm.runtime.tensor(x[:, begin:end].contiguous().numpy()) for x in given), [])
        return [torch.from_numpy(y.numpy()) for y in found]

    alone = [torch.cat(parts, dim=1) for parts in zip(*(rows(i, i + 1) for i in range(32)), strict=True)]
    for count in COUNTS:
        for got, expected in zip(rows(0, count), alone, strict=True):
            assert torch.equal(got, expected[:, :count]), count


def module(func: tvm.tirx.PrimFunc, isa: Isa) -> Any:
    """Compile a kernel without executing it."""
    if isa.name in neon.ISAS:
        return emulated_arm.compiled(func, isa)
    mod = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    return tvm.compile(mod, target=X86().tvm_target(isa), tir_pipeline=PIPELINE)


def sources(mod: Any) -> list[str]:
    """Return the LLVM code of a module and those that it imports."""
    own = [mod.inspect_source("ll")] if mod.kind == "llvm" else []
    return own + [code for part in mod.imports for code in sources(part)]


def left_to_llvm(code: str) -> list[str]:
    """Return the sums of products that LLVM may make one instruction or two, by what stands around them.

    It does so where a product's sum is in the same block; ``fmuladd`` is one instruction everywhere.  Products with
    powers of two, constants or numbers made of an integer's bits, are exact, and the same either way.
    """
    found: list[str] = []
    products: set[str] = set()
    exact: set[str] = set()
    for line in code.splitlines():
        if line.startswith("define") or re.match(r"[\w.]+:", line):
            products, exact = set(), exact if ":" in line[:40] else set()
        made = re.match(r"\s+(%[\w.]+) = (bitcast|fmul|fneg|fadd|fsub)\b(.*?)(?:, !dbg.*)?$", line)
        if made is None:
            continue
        name, operation, rest = made.groups()
        operands = set(re.findall(r"%[\w.]+", rest))
        if operation == "bitcast":
            exact |= {name} if "i32" in rest and rest.endswith(("float", "float>")) else set()
        elif operation == "fmul":
            products |= set() if operands & exact or _is_power_of_two(rest) else {name}
        elif operation == "fneg":
            products |= {name} if operands & products else set()
        elif operands & products:
            found.append(line.strip())
    return found


def _is_power_of_two(rest: str) -> bool:
    last = re.search(r"(0x[0-9A-F]+|-?\d[\d.e+-]*)\)?$", rest)
    if last is None:
        return False
    text = last.group(1)
    value = np.frombuffer(bytes.fromhex(text[2:].zfill(16)), ">f8")[0] if text.startswith("0x") else float(text)
    return bool(np.frexp(abs(value))[0] == 0.5)


@pytest.mark.parametrize(("name", "isa", "rows", "prologue"), [
    ("W8A8", x86.AMX, [64], NORM), ("W4A8_ASYM_G32", x86.AMX, [40], GATED), ("W4A16_G32", x86.AMX, [40], GELU),
    ("W8A8_B32x64@50", x86.AMX, [64], NORM), ("W8A16_C", AVX2, [64], CENTRED), ("BIP2A8_G64", AVX2, [64], None),
], ids=lambda value: getattr(value, "name", value) if not isinstance(value, list) else None)  # fmt: skip
def test_each_product_and_its_sum_are_one_instruction(
    name: str, isa: Isa, rows: list[int], prologue: Prologue | None
) -> None:
    func = linear(Format.parse(name), rows, True, isa, {"prologue": prologue, "has_residual": len(rows) == 1})
    for code in sources(module(func, isa).mod):
        assert "fmuladd" in code and not left_to_llvm(code)


def test_a_product_that_waits_for_its_sum_is_found() -> None:
    code = """define void @one() {
  %1 = fmul <16 x float> %a, %b
  %2 = fadd <16 x float> %1, %c
  %3 = fmul float %d, 2.500000e-01
  %4 = fadd float %3, %e
  %5 = bitcast <4 x i32> %n to <4 x float>
  %6 = fmul <4 x float> %5, %p
  %7 = fsub <4 x float> %q, %6
  %8 = fmul float %d, %e
  br label %next
next:
  %9 = fadd float %8, %e
"""
    assert left_to_llvm(code) == ["%2 = fadd <16 x float> %1, %c"]
