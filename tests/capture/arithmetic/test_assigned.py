"""Assignments to slices become concatenations, and numbers of the code become constants, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.capture.capture import capture


class _Assigns(nn.Module):
    def __init__(self, place: slice) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        y = x.cos()
        y[:, self.place] = 2 * x[:, self.place]
        return y


@pytest.mark.parametrize(
    "place",
    [slice(0, 4), slice(1, 9, 3), slice(2, 11, 3), slice(0, None, 2), slice(3, 4, 5), slice(5, 5), slice(-3, -1)],
)
def test_an_assignment_is_a_concatenation(place: slice) -> None:
    graph = capture(_Assigns(place), torch.randn(2, 11))
    x = torch.randn(2, 11)
    assert torch.equal(graph(x), _Assigns(place)(x))
    assert "scatter" not in str(graph.graph)


class _Spreads(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        return x.std(-1, **self.given) + x.var(-1, **self.given)


@pytest.mark.parametrize("given", [{}, {"unbiased": False}, {"keepdim": True}, {"correction": 3, "keepdim": True}])
def test_deviations_are_written_out(given: dict[str, Any]) -> None:
    graph = capture(_Spreads(**given), torch.randn(2, 11))
    x = 100 + torch.randn(2, 11)  # a mean of squares would lose most bits
    torch.testing.assert_close(graph(x), _Spreads(**given)(x), rtol=1e-5, atol=0)
    assert "std" not in str(graph.graph) and "var" not in str(graph.graph)
