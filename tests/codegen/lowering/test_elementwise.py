from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor, nn
from torch.export import Dim
from tvm import relax, tirx
from tvm_ffi import structural_walk

from compressor.capture.capture import capture
from compressor.capture.export import reexport
from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.lowering import compile as lower
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.lowering.converters.converter import Converter
from compressor.codegen.lowering.kernel_set import cpu_kernels
from compressor.codegen.lowering.phases import phases
from compressor.codegen.targets.x86 import X86
from compressor.codegen.tuning import Tuner

WIDTH = 48


class Chain(nn.Module):
    """What surrounds linears: activations, gates, a softmax, shapes, a sum over the last dimension."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gated = torch.nn.functional.silu(x) * y + torch.tanh(y)
        halves = torch.cat([-gated[..., 24:], gated[..., :24]], dim=-1)
        turned = halves.reshape(*x.shape[:-1], 4, 12).transpose(1, 2)
        return gated, turned, torch.softmax(x, dim=-1), (torch.nn.functional.gelu(y) * x).sum(-1)


@pytest.fixture(scope="module")
def chain() -> tuple[Any, Any]:
    rows = Dim("rows", min=1)
    shapes = ({1: rows}, {1: rows})
    graph = capture(Chain(), (torch.zeros(1, 5, WIDTH), torch.zeros(1, 5, WIDTH)), dynamic_shapes=shapes)
    return graph, compile_graph(graph, X86(), tune="off")


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(1, rows, WIDTH, generator=rng) * 4 for _ in range(2))
    return x, y


def test_small_and_large_sizes_equal_pytorch(chain: tuple[Any, Any]) -> None:
    """Small ones take the serial branch, large ones the parallel; widths are vectorised."""
    graph, library = chain
    vm = relax.VirtualMachine(library.executable, tvm.cpu())
    assert 3 * WIDTH < PARALLEL_FROM < 3000 * WIDTH
    for rows in (1, 3, 3000):
        given = inputs(rows)
        got = vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in given), [])
        for mine, expected in zip(got, graph(*given), strict=True):
            assert mine.shape == tuple(expected.shape)
            largest = float(expected.abs().max())
            np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=0, atol=1e-6 * largest)


def test_both_branches_give_the_same_bits(chain: tuple[Any, Any]) -> None:
    """Rows computed alone, in the serial branch, and among many, in the parallel one."""
    vm = relax.VirtualMachine(chain[1].executable, tvm.cpu())
    x, y = inputs(3000)

    def run(part: slice) -> list[np.ndarray]:
        given = [tvm.runtime.tensor(t[:, part].contiguous().numpy()) for t in (x, y)]
        return [
            np.moveaxis(out.numpy(), 2, 1) if out.numpy().ndim == 4 else out.numpy() for out in vm["main"](*given, [])
        ]

    whole = run(slice(0, 3000))
    for part in (slice(0, 1), slice(1000, 1003), slice(2999, 3000)):
        for alone, among in zip(run(part), whole, strict=True):
            np.testing.assert_array_equal(alone, among[:, part])


def scheduled() -> tvm.IRModule:
    """Lower the chain through the phase that schedules it."""
    isa = X86().resolve()
    rows = Dim("rows", min=1)
    args = (torch.zeros(1, 5, WIDTH), torch.zeros(1, 5, WIDTH))
    program = reexport(capture(Chain(), args, dynamic_shapes=({1: rows}, {1: rows})))
    mod, _ = lower.import_program(
        program, Converter(cpu_kernels(isa), Tuner("off", 1, None, "")).table(), lower.Importer(None)
    )
    with X86().tvm_target(isa):
        for name, phase in phases():
            mod = phase(mod)
            if name == "schedule_elementwise":
                return mod
    raise AssertionError("there is no phase schedule_elementwise")


def loops(func: tirx.PrimFunc) -> list[tirx.For]:
    found: list[tirx.For] = []
    structural_walk(func.body, (tirx.For, found.append))
    return found


def test_every_generated_kernel_is_vectorised_and_guarded() -> None:
    mod = scheduled()
    kernels = {gvar.name_hint: func for gvar, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}
    generated = {name: func for name, func in kernels.items() if not name.startswith("probe")}
    assert len(generated) >= 3
    for name, func in generated.items():
        kinds = {loop.kind for loop in loops(func)}
        assert tirx.ForKind.PARALLEL in kinds, name
        choices: list[Any] = []
        structural_walk(func.body, (tirx.IfThenElse, choices.append))
        for choice in choices:  # what runs in parallel runs serially where it is small
            inner = loops(func.with_body(choice.else_case)) if choice.else_case is not None else []
            assert tirx.ForKind.PARALLEL not in {loop.kind for loop in inner}, name
        branches = [loop for choice in choices for loop in loops(func.with_body(choice.then_case))]
        guarded = [loop for loop in branches if loop.kind == tirx.ForKind.PARALLEL]
        assert len(guarded) == sum(loop.kind == tirx.ForKind.PARALLEL for loop in loops(func)), name
    assert any(tirx.ForKind.VECTORIZED in {loop.kind for loop in loops(func)} for func in generated.values())


def test_exp_is_a_polynomial_and_exact_to_two_units() -> None:
    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x)

    graph = capture(Exponential(), (torch.zeros(7),), dynamic_shapes=({0: Dim("n", min=1)},))
    library = compile_graph(graph, X86(), tune="off")
    vm = relax.VirtualMachine(library.executable, tvm.cpu())
    x = torch.cat([torch.linspace(-86.9, 87.9, 20001), torch.tensor([0.0, -0.0, 1.0])])
    got = torch.from_numpy(vm["main"](tvm.runtime.tensor(x.numpy()), []).numpy()).double()
    expected = x.double().exp()
    assert float(((got - expected) / expected).abs().max()) < 2 * torch.finfo(torch.float32).eps
    far = tvm.runtime.tensor(np.array([-1e4, -100.0, -np.inf], "float32"))
    assert float(np.abs(vm["main"](far, []).numpy()).max()) < 1e-37  # masked scores vanish, and are no NaN


def test_erf_is_a_quotient_of_polynomials_near_to_the_error_function() -> None:
    class ErrorFunction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    graph = capture(ErrorFunction(), (torch.zeros(7),), dynamic_shapes=({0: Dim("n", min=1)},))
    vm = relax.VirtualMachine(compile_graph(graph, X86(), tune="off").executable, tvm.cpu())
    x = torch.cat([torch.linspace(-6, 6, 40001), torch.tensor([0.0, 1e-30, -1e-8, 1e30, -torch.inf, torch.inf])])
    got = torch.from_numpy(vm["main"](tvm.runtime.tensor(x.numpy()), []).numpy()).double()
    expected = torch.erf(x.double())
    assert torch.equal(got[x == 0], expected[x == 0])
    error = (got - expected)[x != 0] / expected[x != 0]
    assert float(error.abs().max()) < 4e-7
    assert float(got.abs().max()) <= 1


class Operators(nn.Module):
    """Every operator around linears, of numbers and of none."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        f = torch.nn.functional
        return {
            "relu": f.relu(x), "sigmoid": torch.sigmoid(x), "tanh": torch.tanh(x), "silu": f.silu(x), "gelu": f.gelu(x),
            "tanh gelu": f.gelu(x, approximate="tanh"), "exp": torch.exp(x), "clamp": x.clamp(-1, 1),
            "maximum": torch.maximum(x, y), "minimum": torch.minimum(x, y),
            "softmax": torch.softmax(x, -1), "log_softmax": torch.log_softmax(x, -1), "rsqrt": torch.rsqrt(x.abs()),
            "mean": x.mean(-1), "relu6": f.relu6(x), "hardtanh": f.hardtanh(x), "leaky_relu": f.leaky_relu(x),
            "softplus": f.softplus(x), "elu": f.elu(x), "sum": x.sum(-1), "quotient": x / y, "product": x * y,
            "layer_norm": f.layer_norm(x, (WIDTH,), torch.ones(WIDTH), torch.zeros(WIDTH)),
        }  # fmt: skip


SPECIAL = (float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e30, 1e-40, -1e-40, 90.0, -90.0, -0.0)


def test_special_floats_are_those_of_pytorch() -> None:
    shape = (1, len(SPECIAL) + 1, WIDTH)
    graph = capture(Operators(), (torch.zeros(shape), torch.ones(shape)))
    names = graph.meta["outputs"]
    vm = relax.VirtualMachine(compile_graph(graph, X86(), tune="off").executable, tvm.cpu())
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    for row, value in enumerate(SPECIAL):
        x[0, row, 5] = value
        y[0, row, 11] = value
    x[0, -1] = 1e30 * x[0, -1].sign()
    found = vm["main"](tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(y.numpy()), [])
    results = dict(zip(names, (mine.numpy() for mine in found), strict=True))
    for name, expected in Operators()(x, y).items():
        mine, wanted = results[name], expected.numpy()
        if name == "gelu":  # PyTorch's is NaN at infinity, and infinite at 3.4e38
            wanted = np.where(x.numpy() > 1e38, x.numpy(), wanted)
        if name == "layer_norm":  # where the variance overflows, PyTorch's is 0 or NaN
            overflows = (x.numpy().astype(np.float64) ** 2).sum(-1) > 3e38
            assert np.isnan(mine[overflows]).all()
            mine, wanted = mine[~overflows], wanted[~overflows]
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


class Means(nn.Module):
    """A mean whose sums run along memory, and one of neighbours."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((1, 2)), x.mean((2, 3))


def test_sums_of_rows_are_vectors() -> None:
    graph = capture(Means(), (torch.zeros(2, 5, 4, WIDTH),), dynamic_shapes=({0: Dim("batch", min=1)},))
    library = compile_graph(graph, X86(), tune="off")
    vm = relax.VirtualMachine(library.executable, tvm.cpu())
    for batch in (1, 300):  # serial and parallel
        x = torch.randn(batch, 5, 4, WIDTH, generator=torch.Generator().manual_seed(batch))
        for mine, expected in zip(vm["main"](tvm.runtime.tensor(x.numpy()), []), graph(x), strict=True):
            np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=0, atol=1e-6)
