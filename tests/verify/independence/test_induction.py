"""Operators that loop over tokens: proven for any number of them, unless one token mixes entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.library import custom_op

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.capture.capture import capture
from compressor.ops import recurrence
from compressor.verify.independence import induction
from compressor.verify.independence.check import check_independence

OPS = torch.ops.compressor
LEAKS = "a token leaves its state with the entries in other places"


@custom_op("compressor_test::leaky", mutates_args=())
def leaky(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Keep a state [B, B] whose rows and columns each token swaps."""
    outputs = []
    for t in range(x.shape[1]):
        state = state.transpose(0, 1)
        outputs.append(x[:, t] * 2)
    return torch.stack(outputs, dim=1), state.contiguous()


@leaky.register_fake
def _(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


@pytest.fixture
def known_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(induction, "TOKENS", {torch.ops.compressor_test.leaky.default: ("x",)})
    return


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


class CallWithState(Call):
    def forward(self, x: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        return self.function(x, self.weight, state)


def captured(function: Any, *examples: Tensor) -> Any:
    batch, steps = Dim("batch", min=2), Dim("steps", min=2)
    shapes = ({0: batch, 1: steps}, *({0: batch} for _ in examples[1:]))
    module = Call(function) if len(examples) == 1 else CallWithState(function)
    return capture(module, examples, dynamic_shapes=shapes)


def test_any_number_of_tokens() -> None:
    x, state = torch.randn(3, 5, 4), torch.randn(3, 2, 4)
    graph = captured(lambda x, w, s: OPS.causal_convolution(x, w, None, s), x, state)
    assert check_independence(graph).independent
    zeros = captured(lambda x, w: OPS.causal_convolution(x, w, None, x.new_zeros(x.shape[0], 2, 4)), x)
    assert check_independence(zeros).independent


def test_entries_that_meet_before_are_found() -> None:
    x, state = torch.randn(3, 5, 4), torch.randn(3, 2, 4)
    flipped = captured(lambda x, w, s: OPS.causal_convolution(x, w, None, s.flip(0))[0], x, state)
    assert "reverses" in str(check_independence(flipped))
    along = captured(
        lambda x, w: OPS.causal_convolution(x.transpose(0, 1), w, None, x.new_zeros(x.shape[1], 2, 4))[0], x
    )
    assert "goes along dimension 1 of 'x', along which the entries lie" in str(check_independence(along))


def test_a_token_that_mixes_is_found(known_loop: None) -> None:
    def mixing(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.compressor_test.leaky(x, x.sum((1, 2))[:, None].expand(-1, x.shape[0]))[0]

    graph = captured(mixing, torch.randn(4, 5, 4))
    found = check_independence(graph)
    assert not found.independent and LEAKS in str(found)


def test_every_operator_with_a_state_is_known() -> None:
    assert all(induction.loops_over_tokens(operator) for operator in recurrence.TOKENS)
