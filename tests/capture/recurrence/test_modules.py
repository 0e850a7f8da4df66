"""PyTorch's recurrent modules, captured as linears and gates, against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from kernel_cases import Program
from tiny_models import quantized
from torch import nn
from torch.export import Dim

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.errors import CaptureError
from compressor.graph.sites import linear_sites, packed_sites


class Around(nn.Module):
    """A recurrent module and a linear on its last output; states come in and go out."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        width = (inner.proj_size or inner.hidden_size) * (2 if inner.bidirectional else 1)
        self.inner, self.head = inner, nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        given = (states if len(states) > 1 else states[0]) if states else None
        y, ends = self.inner(x, given)
        return self.head(y), *(ends if isinstance(ends, tuple) else (ends,))


def around(kind: Any, **options: Any) -> Around:
    torch.manual_seed(0)
    return Around(kind(12, 16, **options)).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"batch_first": True}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 6}),
        (nn.GRU, {"num_layers": 2, "bias": False, "batch_first": True}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_module(kind: Any, options: dict[str, Any]) -> None:
    module, x = around(kind, **options), torch.randn(3, 3, 12)
    before = dict(module.named_modules())
    graph = capture(module, x)
    for got, expected in zip(graph(x), module(x), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert dict(module.named_modules()) == before and "forward" not in module.inner.__dict__
    found = [site.name for site in linear_sites(graph) if site.module_class == "Linear"]
    assert found[0] == "inner.input_l0" and found[-1] == "head"
    assert len(found) == 1 + options.get("num_layers", 1) * (1 + options.get("bidirectional", False))


def test_a_stream_of_single_steps_is_packed_and_lowered() -> None:
    module, x = around(nn.LSTM, batch_first=True), torch.randn(2, 4, 12)
    first = (x[:, :1], torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    graph = quantized(capture(module, first), "W4A16_G8", "Linear")
    assert {site.name for site in packed_sites(graph)} == {"inner.input_l0", "inner.hidden_l0", "head"}
    program = Program(graph, compile_graph(graph, X86(), tune="off"))
    states, held = list(first[1:]), list(first[1:])
    for t in range(4):
        given = [tvm.runtime.tensor(part.contiguous().numpy()) for part in (x[:, t : t + 1], *states)]
        y, *states = (torch.from_numpy(part.numpy()) for part in program.vm["main"](*given, program.parameters))
        expected, *held = graph(x[:, t : t + 1], *held)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)


def test_what_is_refused() -> None:
    module, x = nn.GRU(12, 16, batch_first=True), torch.randn(2, 4, 12)
    with pytest.raises(CaptureError, match=r"runs over .* steps; a fixed number of up to 1024"):
        capture(module, x, dynamic_shapes=({1: Dim("steps", min=2)},))
    with pytest.raises(CaptureError, match="runs over 1025 steps"):
        capture(module, torch.zeros(1, 1025, 12))
