"""Kernels of PyTorch's operators on integers and indices against eager: promotion of types, indices from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tvm
from torch import Tensor, nn
from torch.export import Dim
from tvm import relax

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86

TOLERANCE = 1e-6  # relative to each element, or absolute; integers must be equal
TABLE = torch.arange(44, dtype=torch.float32).reshape(11, 4)

PROMOTED: dict[str, Callable[[Tensor], Tensor]] = {
    "integers times a float": lambda i: torch.arange(i.shape[0]) * 0.5,
    "sum": lambda i: i + 0.5,
    "difference": lambda i: i - 0.5,
    "number less integers": lambda i: 1.5 - i,
    "quotient": lambda i: i / 2,
    "quotient by a fraction": lambda i: i / 0.5,
    "quotient of integers": lambda i: i / (i.abs() + 1),
    "number by integers": lambda i: 3 / (i + 10),
    "by a symbolic size": lambda i: i / i.shape[0],
    "floats times a size": lambda i: i.float() * i.shape[0],
    "floor by a fraction": lambda i: i // 1.5,
    "quotient towards zero": lambda i: torch.div(i, 2, rounding_mode="trunc"),
    "quotient downwards": lambda i: torch.div(i, 3, rounding_mode="floor"),
    "remainder": lambda i: i % 1.5,
    "power": lambda i: i.abs() ** 0.5,
    "number to integers": lambda i: 10000.0 ** (i / 7),
    "two to integers": lambda i: 2.0**i,
    "where of two types": lambda i: torch.where(i > 0, i, i.float() * 0.5),
    "where of numbers": lambda i: torch.where(i > 0, 1, 0.5),
    "where of an infinity": lambda i: torch.where(i > 0, 0.0, float("-inf")),
    "where of integers": lambda i: torch.where(i > 0, i, -1),
    "clamp by floats": lambda i: i.clamp(0.5, 1.5),
    "clamp from below": lambda i: i.clamp(min=0),
    "largest": lambda i: torch.maximum(i, torch.tensor(0.5)),
    "full of another type": lambda i: torch.full_like(i, 0.5, dtype=torch.float32) + i.new_full(i.shape, 2),
    "a factor": lambda i: torch.add(i, i, alpha=2) + torch.sub(i.float(), i, alpha=0.5),
    "exponential": lambda i: torch.exp(i),
    "cosine": lambda i: torch.cos(i),
    "reciprocal": lambda i: (i.abs() + 1).reciprocal(),
    "half of bools": lambda i: (i > 0) * 0.5,
    "bools and a number": lambda i: (i > 0) + 1,
    "int32 and int64": lambda i: i.int() * i,
    "int32 and a float": lambda i: i.int() * 0.5,
    "equal to a fraction": lambda i: (i == 0.5).float(),
    "less than a fraction": lambda i: (i < 0.5).float(),
    "truncated": lambda i: (i * 0.7).long(),
    "joined": lambda i: torch.cat([i, i.float() * 0.5]),
    "sum of a product": lambda i: torch.addcmul(i.float(), i.float(), i.float(), value=0.5),
    "other names": lambda i: torch.multiply(i, 0.5) + torch.subtract(i, 0.5) + torch.divide(i, 2),
}
INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows of a constant": lambda x, i: TABLE[i],
    "rows": lambda x, i: x[i],
    "rows by int32": lambda x, i: x[i.int()],
    "the last row": lambda x, i: x[torch.tensor([-1])],
    "columns": lambda x, i: x[:, torch.tensor([0, -1, -2])],
    "columns that vary": lambda x, i: x[:, i.clamp(-6, 5)],
    "columns by a matrix": lambda x, i: x[:, i.clamp(-6, 5)[:, None] * torch.tensor([1, 0])],
    "one of each row": lambda x, i: x[torch.arange(x.shape[0]), i.clamp(-6, 5)],
    "a grid": lambda x, i: x[i[:, None], i.clamp(-6, 5)[None]],
    "behind a whole dimension": lambda x, i: x.reshape(-1, 2, 3)[:, i.clamp(-2, 1), i.clamp(-3, 2)],
    "around a whole dimension": lambda x, i: x.reshape(-1, 2, 3)[i, :, i.clamp(-3, 2)],
    "of the flattened": lambda x, i: torch.take(x, i),
    "narrow from the end": lambda x, i: x.narrow(1, -2, 2),
    "slices from the end": lambda x, i: x[:, -5:-1:2] + x[:, -100:2],
    "halves that gate": lambda x, i: torch.nn.functional.glu(x) + torch.nn.functional.glu(x[None], dim=2)[0],
    "put at the end": lambda x, i: torch.select_scatter(x, x[:, 0] * 9, 1, -1),
}


class Several(nn.Module):
    """Compute each of some functions of the same inputs, by name."""

    def __init__(self, functions: dict[str, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, i: Tensor) -> dict[str, Tensor]:
        return {name: function(x, i) for name, function in self.functions.items()}


def check(functions: dict[str, Callable[..., Tensor]], x: Tensor, i: Tensor) -> None:
    module, n = Several(functions), Dim("n", min=2)
    graph = capture(module, (x[:5].clone(), i[:5].clone()), dynamic_shapes=({0: n}, {0: n}))
    vm: Any = relax.VirtualMachine(compile_graph(graph, X86(), tune="off").executable, tvm.cpu())
    found = vm["main"](tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(i.numpy()), [])
    results = dict(zip(graph.meta["outputs"], (each.numpy() for each in found), strict=True))
    for name, expected in module(x, i).items():
        assert results[name].dtype == expected.numpy().dtype, name
        np.testing.assert_allclose(results[name], expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_types_are_promoted_as_in_pytorch() -> None:
    i = torch.tensor([0, -1, 2, -3, 1, -7, 6])
    check({name: lambda x, i, f=f: f(i) for name, f in PROMOTED.items()}, i.float(), i)


def test_negative_indices_count_from_the_end() -> None:
    i = torch.tensor([0, -1, 2, -3, 1, -7, 6])
    check(INDEXED, torch.arange(42, dtype=torch.float32).reshape(7, 6) * 1.5, i)
