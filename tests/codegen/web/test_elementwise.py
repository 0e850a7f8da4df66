"""WGSL that TVM generates: functions of float32 on a device, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tvm import te, tirx

from compressor.codegen.targets.webgpu import WGSL, Webgpu
from compressor.codegen.web.elementwise import Generated, generate
from compressor.codegen.web.execute_webgpu import run_kernels
from compressor.errors import VerificationError


def written(function: Callable[[Any], Any]) -> Generated:
    """Write a function of each element, for a number of elements that is known only later."""
    source = te.placeholder((te.var("n", "int64"),), "float32", "x")
    result = te.compute(source.shape, lambda i: function(source[i]), "y")
    return generate(te.create_prim_func([source, result]), "function", Webgpu().tvm_target(WGSL))


def run(function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    """Execute the kernel of a function of each element."""
    made = written(function)
    sizes = [len(x)] * (len(made.sizes) - 1) + [-(-len(x) // 256)]
    (found,) = run_kernels({"function": made.record}, [x], sizes, {made.operands.index(1): ("float32", x.shape)})
    return found


FUNCTIONS: dict[str, tuple[Any, Any, float, float]] = {  # ours, numpy's, the largest argument, the largest error
    "sin": (tirx.sin, np.sin, 20_000, 4e-7),  # angles of the last of many positions
    "cos": (tirx.cos, np.cos, 20_000, 4e-7),
    "tanh": (tirx.tanh, np.tanh, 300, 4e-7),
    "sigmoid": (tirx.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 300, 4e-7),
    "cube": (lambda x: tirx.pow(x, tirx.const(3.0, "float32")), lambda x: x**3, 3, 4e-6),
    "power": (lambda x: tirx.pow(tirx.const(10_000.0, "float32"), x), lambda x: 1e4**x, 1, 1e-2),
    "constant": (lambda x: x + tirx.const(1.5703125, "float32"), lambda x: x + 1.5703125, 1, 2e-7),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_float32(name: str, require_adapter: None) -> None:
    ours, expected, largest, error = FUNCTIONS[name]
    x = np.random.default_rng(0).uniform(-largest, largest, 5001).astype(np.float32)
    with np.errstate(over="ignore"):
        assert np.abs(run(ours, x) - expected(x.astype(np.float64))).max() < error


def _bounded(x: Any) -> Any:
    return tirx.max(tirx.min(x, tirx.const(1.0, "float32")), tirx.const(-1.0, "float32"))


SPECIAL: dict[str, tuple[Any, Any]] = {
    "relu": (lambda x: tirx.max(x, tirx.const(0.0, "float32")), torch.relu),
    "clamp": (_bounded, lambda x: x.clamp(-1, 1)),
    "maximum": (lambda x: tirx.max(x, -x), lambda x: torch.maximum(x, -x)),
    "minimum": (lambda x: tirx.min(-x, x), lambda x: torch.minimum(-x, x)),
    "tanh": (tirx.tanh, torch.tanh),
    "sigmoid": (tirx.sigmoid, torch.sigmoid),
    "erf": (tirx.erf, torch.erf),
    "exp": (tirx.exp, torch.exp),
    "silu": (lambda x: x * tirx.sigmoid(x), torch.nn.functional.silu),
    "rsqrt": (tirx.rsqrt, torch.rsqrt),
    "infinities": (
        lambda x: tirx.Select(x > 1, tirx.const(float("inf"), "float32"), tirx.const(-float("inf"), "float32")),
        lambda x: torch.where(x > 1, torch.inf, -torch.inf),
    ),
    "quotient": (lambda x: tirx.const(1.0, "float32") / x, torch.reciprocal),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_floats_are_those_of_pytorch(name: str, require_adapter: None) -> None:
    ours, expected = SPECIAL[name]
    x = torch.tensor([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e30, -1e30, 90.0, -90.0, 1e-40, 0.0, 1.0])
    np.testing.assert_allclose(run(ours, x.numpy()), expected(x).numpy(), rtol=2e-6, atol=1e-6)


def test_a_grid_of_more_workgroups_than_one_dimension_takes(require_adapter: None) -> None:
    x = np.arange(65535 * 256 + 700, dtype=np.float32)
    assert np.array_equal(run(lambda value: value + tirx.const(1.0, "float32"), x), x + 1)


def test_bounds_within_bounds_are_written_once() -> None:
    """GELU's erf has clamps of a clamp: with each argument written twice it took a megabyte, and compilers gave up."""
    made = written(lambda x: x * tirx.const(0.5, "float32") * (tirx.const(1.0, "float32") + tirx.erf(x)))
    assert len(made.record["source"]) < 8_000


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_what_wgsl_cannot_store_is_refused(dtype: str) -> None:
    source = te.placeholder((8,), dtype, "x")
    result = te.compute((8,), lambda i: source[i], "y")
    with pytest.raises(VerificationError, match="copies: WGSL cannot store"):
        generate(te.create_prim_func([source, result]), "copies", Webgpu().tvm_target(WGSL))
