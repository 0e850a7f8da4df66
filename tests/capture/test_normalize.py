"""Normalisation by rules: graph in, operators out, numbers equal, and a reason for each place that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from compressor.capture.capture import capture


class Of(nn.Module):
    """A function of x and parameters ``w`` [8] and ``m`` [8, 8]."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w, self.m = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w, self.m)


def normalized(function: Callable[..., Tensor], *shape: int) -> tuple[GraphModule, list[str]]:
    """Capture, check the numbers, and return the names of operators too."""
    torch.manual_seed(0)
    module, x = Of(function).requires_grad_(False), torch.randn(*(shape or (2, 3, 8)))
    graph = capture(module, (x,))
    torch.testing.assert_close(graph(x), module(x))
    return graph, [str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function"]


def reasons(graph: GraphModule, rule: str) -> list[str]:
    return [outcome.reason for outcome in graph.meta["rules"] if outcome.rule == rule]


def mean_square(x: Tensor, dims: Any = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + 1e-5)


@pytest.mark.parametrize(("rule", "function", "operators"), [
    ("linear", lambda x, w, m: functional.linear(x, m, w), ["compressor.dense_linear.default"]),
    ("product with a turned weight", lambda x, w, m: x @ m.T, ["compressor.dense_linear.default"]),
    ("added bias", lambda x, w, m: x @ m.T + w, ["compressor.dense_linear.default"]),
    ("RMS norm", lambda x, w, m: w * mean_square(x), ["compressor.rms_norm.default"]),
    ("RMS norm", lambda x, w, m: mean_square(x) * (1 + w), ["compressor.rms_norm.default"]),
    ("fused RMS norm", lambda x, w, m: functional.rms_norm(x, (8,), w, 1e-5), ["compressor.rms_norm.default"]),
    ("operator without effect dropped", lambda x, w, m: x.float().reshape(2, 3, 8).neg(), ["neg.default"]),
    ("operator without effect dropped", lambda x, w, m: (x * 1.0)[:].contiguous().neg(), ["neg.default"]),
])  # fmt: skip
def test_what_is_rewritten(rule: str, function: Callable[..., Tensor], operators: list[str]) -> None:
    graph, found = normalized(function)
    assert found == operators
    assert reasons(graph, rule) and not any(reasons(graph, rule))


def test_a_transposed_weight_becomes_a_view() -> None:
    graph, found = normalized(lambda x, w, m: torch.addmm(w, x.reshape(6, 8), m).reshape(2, 3, 8))
    assert found == ["compressor.dense_linear.default"] and reasons(graph, "addmm") == [""]


def test_pooling_to_one_value_becomes_a_mean() -> None:
    graph, found = normalized(lambda x, w, m: functional.adaptive_avg_pool2d(x, 1), 1, 2, 4, 4)
    assert found == ["mean.dim"] and reasons(graph, "average pooling") == [""]


@pytest.mark.parametrize(("rule", "function", "reason"), [
    ("linear", lambda x, w, m: functional.linear(x, m + 1), "its weight is computed, not stored"),
    ("linear", lambda x, w, m: functional.linear(x.double(), m.double()).float(), "its input is not float32"),
    ("addmm", lambda x, w, m: torch.addmm(w, x[0], m) + m[:3], "its weight is computed, or read by other operators"),
    ("addmm", lambda x, w, m: torch.addmm(w, x[0], m, beta=2), "it scales its terms"),
    ("addmm", lambda x, w, m: torch.addmm(x[1], x[0], m), "its bias is not a stored vector"),
    ("RMS norm", lambda x, w, m: w * mean_square(x, (-2, -1)), "its mean is not over the last dimension alone"),
    ("RMS norm", lambda x, w, m: (w * 2) * mean_square(x), "its gain is not a stored vector"),
    ("RMS norm", lambda x, w, m: (lambda g: g * mean_square(x) + g)(1 + w), "its gain is not a stored vector"),
    ("fused RMS norm", lambda x, w, m: functional.rms_norm(x, (3, 8), None, 1e-5), "it is over 2 dimensions"),
    ("fused RMS norm", lambda x, w, m: functional.rms_norm(x, (8,), None, 1e-5), "it has no stored weight"),
    ("fused RMS norm", lambda x, w, m: functional.rms_norm(x, (8,), w), "its epsilon is not stated"),
    ("operator without effect dropped", lambda x, w, m: x.reshape(6, 8), "it turns ['2', '3', '8'] into ['6', '8']"),
    ("operator without effect dropped", lambda x, w, m: x.double(), "it turns torch.float32 into torch.float64"),
    ("operator without effect dropped", lambda x, w, m: x * 2, "it multiplies by 2"),
    ("operator without effect dropped", lambda x, w, m: x[:, 1:], "it takes a part of the dimension"),
    ("operator without effect dropped", lambda x, w, m: x.mT.contiguous(), "it changes the layout in memory"),
    ("average pooling", lambda x, w, m: functional.adaptive_avg_pool2d(x, (1, 2)), "it leaves [1, 2] values a channel"),
])  # fmt: skip
def test_what_is_left_and_why(rule: str, function: Callable[..., Tensor], reason: str) -> None:
    graph, _ = normalized(function)
    assert any(found.startswith(reason) for found in reasons(graph, rule)), graph.meta["rules"]


class Doubled(nn.Conv2d):
    """A convolution whose bias is computed."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.bias is not None
        return functional.conv2d(input, self.weight, 2 * self.bias, groups=self.groups)


class Images(nn.Module):
    """A convolution with a batch norm, one of groups with a computed bias, and a batch norm with other readers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.two = Doubled(8, 8, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.one(x)).relu()
        return self.two(y) + y[:, :, 1:-1, 1:-1] + torch.ones(4)


def test_convolutions_and_the_reasons_of_those_that_stay() -> None:
    torch.manual_seed(0)
    module, x = Images().eval().requires_grad_(False), torch.randn(2, 4, 8, 8)
    graph = capture(module, (x,))
    torch.testing.assert_close(graph(x), module(x))
    assert reasons(graph, "batch norm") == [""]
    assert reasons(graph, "convolution to a linear over patches") == [
        "", "its bias is shared or computed",
    ]  # fmt: skip
    assert "" in reasons(graph, "element-wise operator with channels last")
    (module_path,) = {o.module for o in graph.meta["rules"] if o.rule.startswith("convolution") and not o.matched}
    assert module_path == "two"


class Means(nn.Module):
    """Means over pixels, kept or not, and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.one(x)
        return y.mean((2, 3)), y.mean((-1, -2), keepdim=True) * y, y.mean(1)


def test_means_of_pixels_read_channels_last() -> None:
    torch.manual_seed(0)
    module, x = Means().eval().requires_grad_(False), torch.randn(2, 3, 6, 5)
    graph = capture(module, (x,))
    for got, expected in zip(graph(x), module(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert reasons(graph, "mean of pixels with channels last") == ["", "", "it is not the mean of an image's pixels"]
