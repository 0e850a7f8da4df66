"""Kernels with a state against the eager operators: ragged lengths, every kind of decay, steps, special floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import tvm
from kernel_cases import OPS, TOLERANCE, build, check_special, relative_error

from compressor.codegen.kernels.recurrence.causal_convolution import causal_convolution
from compressor.codegen.kernels.recurrence.delta_rule import gated_delta_rule
from compressor.codegen.kernels.recurrence.selective_scan import selective_scan
from compressor.codegen.kernels.recurrence.wkv import wkv
from compressor.codegen.targets import x86

LENGTHS = (1, 2, 7, 33)


class Case:
    """One kernel, and random operands of its operator: those of tokens along dimension 1, and those of the layer."""

    def __init__(self, func: tvm.tirx.PrimFunc, operator: Any, tokens: list[tuple], fixed: dict[int, tuple], state):
        self.kernel, self.operator, self.state = build(func, x86.AVX512_VNNI), operator, state
        self.tokens, self.fixed = tokens, fixed
        self.rng = torch.Generator().manual_seed(7)

    def normal(self, shape: tuple) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng)

    def operands(self, batch: int, length: int) -> list[torch.Tensor]:
        """Token by token first, in the operator's order; decays and steps as layers make them."""
        given = [self.normal((batch, length, *shape)) for shape in self.tokens]
        if self.operator is OPS.selective_scan:
            given[1] = torch.nn.functional.softplus(given[1])
        if self.operator is OPS.gated_delta_rule:
            given[0], given[1] = (torch.nn.functional.normalize(x, dim=-1) for x in given[:2])
            given[3], given[4] = -torch.nn.functional.softplus(given[3]), torch.sigmoid(given[4])
        for place, shape in self.fixed.items():
            given.insert(place, -self.normal(shape).exp() if self.operator is not OPS.causal_convolution else None)
            if given[place] is None:
                given[place] = self.normal(shape)
        return given

    def run(self, given: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = tvm.runtime.tensor(state.contiguous().numpy())
        values = given[2] if self.operator is OPS.gated_delta_rule else given[0]
        out = tvm.runtime.tensor(torch.full(values.shape, math.nan).numpy())
        self.kernel(*(tvm.runtime.tensor(x.contiguous().numpy()) for x in given if x is not None), held, out)
        return torch.from_numpy(out.numpy()), torch.from_numpy(held.numpy())

    def part(self, given: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        return [x if place in self.fixed or x is None else x[:, begin:end] for place, x in enumerate(given)]


def cases() -> dict[str, Any]:
    scan, rule = OPS.selective_scan, OPS.gated_delta_rule
    return {
        "convolution": lambda: Case(
            causal_convolution(48, 4, True), OPS.causal_convolution, [(48,)], {1: (48, 4), 2: (48,)}, (3, 48)
        ),
        "convolution, ragged, of two": lambda: Case(
            causal_convolution(10, 2, False), OPS.causal_convolution, [(10,)], {1: (10, 2)}, (1, 10)
        ),
        "Mamba": lambda: Case(
            selective_scan(1, 40, 5, 1, True, (True, True)),
            scan, [(1, 40), (1, 40), (1, 5), (1, 5)], {2: (1, 5, 40)}, (1, 5, 40),
        ),
        "Mamba 2": lambda: Case(
            selective_scan(6, 16, 7, 2, False, (False, False)),
            scan, [(6, 16), (6, 1), (2, 7), (2, 7)], {2: (6, 1, 1)}, (6, 7, 16),
        ),
        "decays of states": lambda: Case(
            selective_scan(2, 9, 3, 2, False, (True, False)),
            scan, [(2, 9), (2, 1), (2, 3), (2, 3)], {2: (2, 3, 1)}, (2, 3, 9),
        ),
        "gated delta rule": lambda: Case(
            gated_delta_rule(2, 4, 12, 32, False),
            rule, [(2, 12), (2, 12), (4, 32), (4, 1), (4,)], {}, (4, 12, 32),
        ),
        "Kimi's rule": lambda: Case(
            gated_delta_rule(2, 2, 8, 10, True), rule, [(2, 8), (2, 8), (2, 10), (2, 8), (2,)], {}, (2, 8, 10)
        ),
        "RWKV": lambda: Case(wkv(48), OPS.wkv, [(48,), (48,)], {2: (48,), 3: (48,)}, (3, 48)),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_kernel(name: str) -> None:
    case = cases()[name]()
    if name.startswith("convolution, ragged"):
        expected_of = lambda given, state: case.operator(given[0], given[1], None, state)  # noqa: E731
    else:
        expected_of = lambda given, state: case.operator(*given, state)  # noqa: E731
    for batch, length in zip((3, 2, 2, 2), LENGTHS, strict=True):
        given, state = case.operands(batch, length), torch.zeros(batch, *case.state)
        for _ in range(2):  # from no tokens, and from some
            got, expected = case.run(given, state), expected_of(given, state)
            for ours, theirs in zip(got, expected, strict=True):
                assert relative_error(ours, theirs) < 4 * TOLERANCE  # exponentials to 2 units in the last place
            state = expected[1]
    whole, begin, pieces, held = case.run(given, state), 0, [], state
    for count in (1, 2, 30):
        y, held = case.run(case.part(given, begin, begin + count), held)
        pieces.append(y)
        begin += count
    assert torch.equal(torch.cat(pieces, dim=1), whole[0]) and torch.equal(held, whole[1])  # the bits of steps

    for value in (math.nan, math.inf, -math.inf, 1e-40):
        for place in range(len(given)):
            given = case.operands(1, 3)
            given[place].flatten()[-1] = value
            ours, theirs = case.run(given, state[:1]), expected_of(given, state[:1])
            for one, other in zip(ours, theirs, strict=True):
                check_special(one, other, 4 * TOLERANCE, (name, value, place))
