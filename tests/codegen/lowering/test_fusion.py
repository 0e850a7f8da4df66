"""Several packed linears in one kernel, and what is computed in front of and behind them: kernels and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from kernel_cases import (
    OPS,
    build,
    check_special,
    random_packed,
    relative_error,
    special_norm,
    special_rows,
    tolerance,
)
from torch import Tensor, fx, nn
from torch.nn import functional

from compressor.capture.capture import capture
from compressor.capture.export import reexport
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.linear.packed import Schedule, common_schedule
from compressor.codegen.kernels.linear.prologue import Prologue
from compressor.codegen.lowering.fused_linear import fused_linear
from compressor.codegen.lowering.fusion import fuse
from compressor.codegen.targets import x86
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

TOKENS = (1, 5, 40, 130)


def run(kernel: Any, operands: list[Tensor | None], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Call with torch operands (None is left out), the outputs last; NaN shows what was not written."""
    results = [tvm.runtime.tensor(torch.full(shape, float("nan")).numpy()) for shape in shapes]
    kernel(*(tvm.runtime.tensor(t.numpy()) for t in operands if t is not None), *results)
    return [torch.from_numpy(result.numpy()) for result in results]


def eager(x: Tensor, packed: PackedWeight, bias: Tensor | None, fmt: Format) -> Tensor:
    rows, columns = packed.shape
    y: Tensor = OPS.packed_linear(x, list(packed.parts.values()), bias, fmt.name, columns, rows)
    return y


@pytest.mark.parametrize(("name", "isa", "columns", "rows", "has_bias"), [
    ("W4A8_G32", x86.AMX, 96, (48, 32, 48), True),
    ("W8A8", x86.AMX, 100, (48, 80), True),
    ("W4A16_ASYM_G32", x86.AVX2, 70, (32, 64), False),
    ("W3A8_C_S10", x86.AVX512_VNNI, 100, (32, 48), False),
    ("BIP2A2_C", x86.AVX512_VNNI, 64, (16, 32), True),
    ("FP8_E4M3_B32", x86.AVX2, 64, (48, 80), False),
], ids=lambda value: getattr(value, "name", None))  # fmt: skip
def test_merged_weights_give_the_bits_of_separate_kernels(
    name: str, isa: Isa, columns: int, rows: tuple[int, ...], has_bias: bool
) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(len(name))
    packed = [random_packed(fmt, n, columns, rng) for n in rows]
    biases = [torch.randn(n, generator=rng) if has_bias else None for n in rows]
    schedule = common_schedule(Schedule(2, 2, 4), rows, fmt, isa)
    merged = build(packed_linear.fused_linear(rows, columns, fmt, has_bias, isa, schedule), isa)
    alone = build(packed_linear.packed_linear(rows[0], columns, fmt, has_bias, isa, schedule), isa)
    for tokens in TOKENS:
        x = torch.randn(1, tokens, columns, generator=rng)
        stored = [part for p, bias in zip(packed, biases, strict=True) for part in (*p.parts.values(), bias)]
        got = run(merged, [x, *stored], [(1, tokens, n) for n in rows])
        for p, bias, y in zip(packed, biases, got, strict=True):
            assert relative_error(y, eager(x, p, bias, fmt)) < tolerance(fmt, isa)
            if p.shape[0] == rows[0]:
                (separate,) = run(alone, [x, *p.parts.values(), bias], [tuple(y.shape)])
                assert torch.equal(y, separate)


def test_merged_weights_of_ragged_shapes() -> None:
    fmt, rng, rows, columns = Format.parse("W4A8_ASYM_G32"), torch.Generator().manual_seed(0), (37, 64, 5), 45
    packed = [random_packed(fmt, n, columns, rng) for n in rows]
    schedule = common_schedule(Schedule(1, 1, 4), rows, fmt, x86.AVX2)
    kernel = build(packed_linear.fused_linear(rows, columns, fmt, False, x86.AVX2, schedule), x86.AVX2)
    for tokens in TOKENS:
        x = torch.randn(2, tokens, columns, generator=rng)
        got = run(kernel, [x, *(part for p in packed for part in p.parts.values())], [(2, tokens, n) for n in rows])
        for p, y in zip(packed, got, strict=True):
            assert relative_error(y, eager(x, p, None, fmt)) < tolerance(fmt, x86.AVX2)


def reference(prologue: Prologue, inputs: list[Tensor], vectors: list[Tensor]) -> Tensor:
    x = inputs[0]
    match prologue.kind:
        case "rms_norm" | "layer_norm":
            bias = vectors[1] if prologue.has_bias else None
            x = special_norm(x, vectors[0], bias, prologue.kind == "layer_norm", prologue.eps).float()
        case "gelu" | "gelu_tanh":
            x = functional.gelu(x, approximate="tanh" if prologue.kind == "gelu_tanh" else "none")
        case kind:
            x = getattr(functional, kind)(x)
    return x * inputs[1] if prologue.gated else x


@pytest.mark.parametrize(("prologue", "name", "isa"), [
    (Prologue("silu", gated=True), "W4A8_G32", x86.AMX),
    (Prologue("gelu"), "W8A8", x86.AMX),
    (Prologue("relu"), "W4A16_G32", x86.AVX2),
    (Prologue("gelu_tanh", gated=True), "W4A16_G32", x86.AMX),
    (Prologue("rms_norm", eps=1e-6), "NVFP4_ANVFP4", x86.AVX512_VNNI),
    (Prologue("layer_norm", eps=1e-5, has_bias=True), "W8A8_ASYM_STATIC", x86.AVX2),
], ids=lambda value: getattr(value, "name", None))  # fmt: skip
def test_prologues_and_residuals(prologue: Prologue, name: str, isa: Isa) -> None:
    """Where an input differs in its last bit it may be rounded to the next code, which is as far as one may be off."""
    fmt, rng, rows, columns = Format.parse(name), torch.Generator().manual_seed(3), 48, 102
    packed, bias = random_packed(fmt, rows, columns, rng), torch.randn(rows, generator=rng)
    kernel = build(
        packed_linear.fused_linear(
            [rows], columns, fmt, True, isa, Schedule(1, 1, 4), prologue=prologue, has_residual=True
        ),
        isa,
    )
    for tokens in TOKENS:
        inputs = [torch.randn(1, tokens, columns, generator=rng) * 2 for _ in range(prologue.inputs)]
        vectors = [torch.randn(columns, generator=rng) for _ in range(prologue.vectors)]
        residual = torch.randn(1, tokens, rows, generator=rng)
        (got,) = run(kernel, [*inputs, *vectors, *packed.parts.values(), bias, residual], [(1, tokens, rows)])
        expected = residual + eager(reference(prologue, inputs, vectors), packed, bias, fmt)
        assert relative_error(got, expected) < (0.01 if fmt.activations else tolerance(fmt, isa))
        assert float((got - expected).abs().median()) < 1e-5 * float(expected.abs().max())
    special = special_rows(columns, rng)
    inputs[0] = special
    inputs[1:] = [torch.rand(special.shape, generator=rng) + 0.5 for _ in inputs[1:]]
    shape = (1, special.shape[1], rows)
    zeros = torch.zeros(shape)
    (got,) = run(kernel, [*inputs, *vectors, *packed.parts.values(), bias, zeros], [shape])
    given = reference(prologue, inputs, vectors)
    check_special(got, eager(given, packed, bias, fmt), 0.01, prologue, given)


def test_a_schedule_serves_all_weights_of_a_kernel() -> None:
    fmt, isa = Format.parse("W4A8_G32"), x86.AVX512_VNNI
    assert common_schedule(Schedule(4, 2, 8), (64, 128), fmt, isa) == Schedule(4, 2, 8)
    assert common_schedule(Schedule(4, 4, 4), (64, 32), fmt, isa) == Schedule(2, 2, 8)
    assert common_schedule(Schedule(4, 2, 8), (64, 37), fmt, x86.AMX).gemm_tiles == 1


# --- what a graph becomes


class Block(nn.Module):
    """A decoder's layer without attention: a norm, three linears that read it, and one with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Shared(Block):
    """The same where others read the norm, an activation function's result and the last linear as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = functional.silu(self.gate(y))
        down = self.down(gate * self.up(y))
        return torch.cat([y + down, down, functional.pad(gate, (0, 32))])


def fused_graph(module: nn.Module, scheme: str) -> fx.Graph:
    graph = Rtn(scheme, targets="Linear").run(capture(module.eval(), (torch.zeros(3, 64),)), Context())
    program = reexport(graph)
    fuse(program.graph)
    program.graph.lint()
    return program.graph


def calls(graph: fx.Graph) -> list[tuple[int, str | None, bool]]:
    """Weights, prologue and residual of each fused call."""
    found = [node.args for node in graph.nodes if node.target is fused_linear]
    return [(len(args[2]), args[4] and args[4].name, args[3] is not None) for args in found]  # type: ignore[misc,arg-type,union-attr]


def names(graph: fx.Graph) -> set[str]:
    return {getattr(node.target, "__name__", "") for node in graph.nodes}


def test_a_layer_becomes_two_calls() -> None:
    graph = fused_graph(Block(), "W4A8_G32")
    assert calls(graph) == [(2, "layer_norm_1em05_bias", False), (1, "silu_mul", True)]
    assert not {"layer_norm.default", "silu.default", "mul.Tensor", "add.Tensor", "packed_linear.default"} & names(
        graph
    )


def test_what_others_read_is_computed_once() -> None:
    graph = fused_graph(Shared(), "W4A8_G32")
    assert calls(graph) == [(2, None, False)]
    assert {"layer_norm.default", "silu.default", "mul.Tensor", "add.Tensor", "packed_linear.default"} < names(graph)


def test_formats_that_share_no_preparation_stay_alone() -> None:
    """NVFP4's scale of the tensor is a weight's own; weights in float16 read their input a second time."""
    assert calls(fused_graph(Block(), "NVFP4")) == [(1, "silu_mul", True)]
    assert calls(fused_graph(Block(), "W4A16_G32_S1")) == [(2, None, False), (1, None, True)]


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + x[:1]


def test_an_addition_that_broadcasts_is_no_residual() -> None:
    graph = fused_graph(Broadcast(), "W4A8_G32")
    assert not calls(graph) and {"packed_linear.default", "add.Tensor"} < names(graph)


def reasons(module: nn.Module, scheme: str) -> dict[str, list[str]]:
    """Why each rule of fusion left a place, by rule; '' where it matched."""
    given = torch.zeros(3, 64)
    program = reexport(Rtn(scheme, targets="Linear").run(capture(module.eval(), (given,)), Context()))
    found: dict[str, list[str]] = {}
    for outcome in fuse(program.graph):
        found.setdefault(outcome.rule, []).append(outcome.reason)
    return found


def test_every_rule_says_what_it_did() -> None:
    assert reasons(Block(), "W4A8_G32") == {
        "linears of one input": [""],
        "norm into linears": [""],
        "gated activation into linears": [""],
        "addition to outputs": [""],
    }
    left = reasons(Shared(), "W4A8_G32")
    assert left["linears of one input"] == [""]
    assert left["norm into linears"] == ["layer_norm is also read by add"]
    assert left["gated activation into linears"] == ["silu has other readers than the product"]
    assert left["addition to outputs"] == ["the addition is not the only reader of the outputs"]


def test_formats_say_why_they_share_nothing() -> None:
    scale = "its activations are prepared with a scale of the whole tensor, which is its weight's own"
    assert reasons(Block(), "NVFP4")["linears of one input"] == [scale] * 2
    outliers = reasons(Block(), "W4A16_G32_S1")
    assert outliers["norm into linears"] == ["weights in float16 read the activations a second time"]


class Heads(nn.Module):
    """Two linears of one input, one without a bias, each behind a function of its own."""

    def __init__(self, function: Any, after: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.function, self.after = function, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x)
        return self.after(self.one(y), x) + self.two(y).neg()


class OneLinear(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.one(self.function(x)), x)


@pytest.mark.parametrize(("rule", "module", "reason"), [
    ("linears of one input", Heads(torch.neg, torch.mul), "no other reader of its input has "),
    ("activation into linears", Heads(functional.silu, torch.mul), "silu is also read by "),
    ("norm into linears", OneLinear(lambda x: functional.layer_norm(x, (3, 64)), torch.mul), "the norm is over 2 dim"),
    ("norm into linears", OneLinear(lambda x: functional.layer_norm(x, (64,)), torch.mul), "the norm has no weight"),
    ("gated activation into linears", OneLinear(lambda x: functional.silu(x) * x[:1], torch.mul), "the factors are"),
    ("addition to outputs", OneLinear(torch.neg, lambda y, x: y + x[:1]), "the other term is not a float32 tensor"),
    ("addition to outputs", OneLinear(torch.neg, lambda y, x: y + y), "the outputs are added to themselves"),
])  # fmt: skip
def test_what_is_left_and_why(rule: str, module: nn.Module, reason: str) -> None:
    found = reasons(module, "W4A8_G32")[rule]
    assert found and all(each.startswith(reason) for each in found)


def test_outputs_of_several_weights_are_not_added_to() -> None:
    class Two(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.gate(x) + x[:, :32], self.up(x)], 1)

    (reason,) = reasons(Two(), "W4A8_G32")["addition to outputs"]
    assert reason == "the kernel has several weights, and adds to the outputs of one only"
