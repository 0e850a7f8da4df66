"""Complex numbers by their parts, against PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

from compressor.capture.capture import capture

TOLERANCE = 1e-6  # relative to the largest element


class Complex(nn.Module):
    def forward(self, x: Tensor, angle: Tensor) -> dict[str, Tensor]:
        turn = torch.polar(torch.ones_like(angle), angle) * 0.9
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = pairs * turn[None]
        return {
            "turned": torch.view_as_real(turned).flatten(2),
            "real": (turned + pairs).real,
            "imaginary": (angle[:, None] - turned.transpose(0, 1)).imag,
            "size": (turned - 2.0).abs(),
            "conjugate": torch.view_as_real(pairs.conj() * pairs / 3 + angle).flatten(2),
            "made": torch.view_as_real(torch.complex(angle, -angle) * angle),
        }


def test_operators_on_parts_equal_those_on_complex_numbers() -> None:
    rows, rng = Dim("rows", min=2), torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 5, 8, generator=rng), torch.randn(5, 4, generator=rng)
    graph = capture(Complex(), (x, angle), dynamic_shapes=({1: rows}, {0: rows}))
    values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert not any(value.is_complex() for value in values)
    for got, (name, expected) in zip(graph(x, angle), Complex()(x, angle).items(), strict=True):
        assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE, name
