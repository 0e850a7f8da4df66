"""Assignments to slices, deviations, shifts and late slices are written with plain operators, with equal results."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._sympy.functions import FloorDiv

from compressor.capture.arithmetic.sizes import _plain
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


class _Neighbours(nn.Module):
    """Adds what stands so many places before and behind, and rows of a table that begin late."""

    def __init__(self, far: int) -> None:
        super().__init__()
        self.far, self.table = far, nn.Buffer(torch.randn(128, 3))

    def forward(self, x: Tensor) -> Tensor:
        pad, far, length = nn.functional.pad, self.far, torch.tensor(min(x.shape[1], 64))
        before, behind = pad(x[:, :-far], [0, 0, far, 0]), pad(x[:, far:], [0, 0, 0, far])
        rows = self.table[64 - length : 64 + length]
        return x + before + 2 * behind + rows.sum(0)


@pytest.mark.parametrize("far", [1, 2])
def test_neighbours_and_late_rows_are_looked_up(far: int) -> None:
    model = _Neighbours(far)
    graph = capture(model, torch.randn(2, 7, 3), dynamic_shapes=({1: Dim("tokens", min=3, max=20)},))
    for length in (3, 8, 20):
        x = torch.randn(2, length, 3)
        assert torch.equal(graph(x), model(x))
    called = {str(node.target) for node in graph.graph.nodes}
    assert not any("pad" in name or "item" in name or "sym_min" in name for name in called)
    begins = [node.args[2] for node in graph.graph.nodes if str(node.target) == "aten.slice.Tensor"]
    assert all(begin is None or isinstance(begin, int) for begin in begins)


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


class _Marks(nn.Module):
    """Assigns, or adds, values where the input is negative: in all places, or in whole rows."""

    def __init__(self, rows: bool, value: Tensor, adds: bool) -> None:
        super().__init__()
        self.rows, self.value, self.adds = rows, nn.Buffer(value), adds

    def forward(self, x: Tensor) -> Tensor:
        y = x.cos()
        mask = x[0, :, 0] < 0 if self.rows else x < 0
        where = [None, mask] if self.rows else [mask]
        return torch.ops.aten.index_put(y, where, self.value, accumulate=self.adds)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("rows", "value"),
    [(False, torch.tensor(2.0)), (False, torch.ones(1)), (True, torch.tensor(3.0)), (True, torch.randn(1, 3))],
)
def test_an_assignment_by_a_mask_is_a_choice(rows: bool, value: Tensor, adds: bool) -> None:
    model = _Marks(rows, value, adds)
    graph = capture(model, torch.randn(2, 7, 3), dynamic_shapes=({1: Dim("tokens", min=1)},))
    x = torch.randn(2, 5, 3)
    assert torch.equal(graph(x), model(x))
    assert "index_put" not in str(graph.graph)


def test_divisions_of_sizes_that_differ_by_a_number_are_compared() -> None:
    """Of a mean over pairs and a stride of two, SEW takes the smaller length: they are equal."""
    n = sympy.Symbol("n", integer=True, positive=True)
    inner = FloorDiv(n - 3, 2)
    assert _plain(FloorDiv(inner + 1, 2) - FloorDiv(inner - 1, 2)) == 1
    assert _plain(FloorDiv(n + 7, 3) - FloorDiv(n - 2, 3)) == 3
    assert not _plain(FloorDiv(n, 2) - FloorDiv(n - 1, 2)).is_number


class _Fills(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.pad(x, (1, 0, y.shape[1] - x.shape[1], x.shape[1]), value=0.5)


def test_filling_up_to_a_size_that_varies_is_a_concatenation() -> None:
    tokens = Dim("tokens", min=2)
    shapes = ({1: tokens}, {1: 3 * tokens})
    graph = capture(_Fills(), (torch.randn(2, 5, 3), torch.randn(2, 15)), dynamic_shapes=shapes)
    x, y = torch.randn(2, 4, 3), torch.randn(2, 12)
    assert torch.equal(graph(x, y), _Fills()(x, y))
    assert "pad" not in str(graph.graph)
