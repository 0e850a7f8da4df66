"""Functions outside the kernel families get threads: they compute in lockstep what NumPy and PyTorch do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lockstep
import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from compressor.codegen.gpu.lower import ScheduleThreads
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.lowering.importer import error_context
from compressor.codegen.lowering.phases import phases
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.errors import VerificationError

O = relax.op  # noqa: E741
WIDTH = 70


def compiled(emit: Callable[[Any, Any], Any], dtype: str = "float32") -> Any:
    """Compile a function of x [n, 4, 70] for the GPU, with the phases of other targets but for the schedules."""
    lockstep.start()
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4, WIDTH), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(emit(builder, x))
        builder.emit_func_output(y)
    mod = builder.get()
    with lockstep.target():
        for name, phase in phases():
            if name != "bundle_parameters":
                mod = ScheduleThreads()(mod) if name == "schedule_elementwise" else phase(mod)
    empty = tvm.transform.Sequential([])
    return relax.vm_build.build(mod, lockstep.target(), relax_pipeline=empty, tir_pipeline=PIPELINE)


def machine(built: Any) -> Any:
    return relax.VirtualMachine(built, [tvm.cuda(0), tvm.cpu(0)])


CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "gated": (lambda _, x: O.multiply(O.nn.silu(x), O.tanh(x)), lambda x: torch.nn.functional.silu(x) * x.tanh()),
    "gelu": (lambda _, x: O.nn.gelu(x), torch.nn.functional.gelu),
    "softmax": (lambda _, x: O.nn.softmax(x), lambda x: x.softmax(-1)),
    "softmax of few": (lambda _, x: O.nn.softmax(x, axis=1), lambda x: x.softmax(1)),
    "rotated": (
        lambda _, x: O.concat([O.negative(O.strided_slice(x, [2], [35], [70])), O.strided_slice(x, [2], [0], [35])], 2),
        lambda x: torch.cat([-x[..., 35:], x[..., :35]], -1),
    ),
    "turned": (lambda _, x: O.permute_dims(x, [2, 0, 1]), lambda x: x.permute(2, 0, 1)),
    "gathered": (
        lambda _, x: O.take(x, relax.const(np.array([3, 0, 3], "int64")), axis=1),
        lambda x: x[:, [3, 0, 3]],
    ),
    "sum of rows": (lambda _, x: O.sum(x, axis=-1), lambda x: x.sum(-1)),
    "mean of a few": (lambda _, x: O.mean(x, axis=1), lambda x: x.mean(1)),
    "sum of all": (lambda _, x: O.sum(O.exp(x)), lambda x: x.exp().sum()),
    "largest": (lambda _, x: O.max(x, axis=-1), lambda x: x.amax(-1)),
    "largest of all": (lambda _, x: O.max(x), lambda x: x.amax()),
    "clipped": (
        lambda _, x: O.minimum(O.maximum(x, relax.const(-1.0)), O.sqrt(x)),
        lambda x: x.clamp(-1).minimum(x.sqrt()),
    ),
    "argmax": (lambda _, x: O.argmax(x, axis=-1), lambda x: x.argmax(-1)),
    "squared norm": (
        lambda _, x: O.divide(x, O.sqrt(O.sum(O.multiply(x, x), axis=-1, keepdims=True))),
        lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_computes_what_pytorch_does(name: str) -> None:
    emit, expected = CASES[name]
    vm = machine(compiled(emit))
    for n in (1, 9):
        x = torch.randn(n, 4, WIDTH, generator=torch.Generator().manual_seed(n)) * 3
        if name != "argmax":
            x[0, 1, 5] = float("nan")
        got = torch.from_numpy(vm["main"](tvm.runtime.tensor(x.numpy(), tvm.cuda(0))).numpy())
        torch.testing.assert_close(got, expected(x), rtol=2e-6, atol=2e-6, equal_nan=True)


def test_small_integers_and_halves() -> None:
    half = relax.const(0.5, "float16")
    vm = machine(compiled(lambda _, x: O.astype(O.add(O.astype(x, "float16"), half), "float32"), "int8"))
    x = np.random.default_rng(0).integers(-128, 127, (2, 4, WIDTH)).astype(np.int8)
    got = vm["main"](tvm.runtime.tensor(x, tvm.cuda(0))).numpy()
    assert (got == x.astype(np.float32) + 0.5).all()


def test_divisions_of_sizes_need_no_care_for_negative_numbers() -> None:
    text = lockstep.cuda_text(compiled(CASES["turned"][0]))
    body = text[text.rindex('extern "C" __global__') :]
    assert "/ (n * (int64_t)4)" in body, body
    assert "rmod" not in body and "rdiv" not in body, body


def test_a_loop_of_the_host_is_refused_by_name() -> None:
    @T.prim_func(s_tir=True, private=True)
    def func():  # type: ignore[no-untyped-def]
        x = T.meta_var(parameter((8,), "float32"))
        y = T.meta_var(parameter((8,), "float32"))
        for t in T.thread_binding(8, thread="threadIdx.x"):
            y[t] = x[t]
        for i in range(8):
            y[i] = x[i] + T.float32(1)

    with pytest.raises(VerificationError, match="plain: a part of it has no threads"), error_context("threads"):
        ScheduleThreads()(tvm.IRModule({"plain": func}))
