"""Convolutions in groups, transposed ones and those of volumes run by our kernels: against the graph in PyTorch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Program, relative_error
from torch import Tensor, nn
from torch.export import Dim

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.data.text import Samples
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context


class Images(nn.Module):
    """Groups of many channels and of few, an even kernel, and transposed convolutions back to the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, padding=1, groups=2)
        self.narrow, self.even = nn.Conv2d(64, 64, 3, padding=1, groups=16), nn.Conv2d(64, 8, 2, padding="same")
        self.up, self.each = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ConvTranspose2d(8, 8, 3, 1, 1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 10, 8] -> [B, 8, 10, 8]."""
        y = self.narrow(self.wide(self.stem(x).relu()).relu()).relu()
        y: Tensor = self.each(self.up(self.even(y)).relu())
        return y


class Volumes(nn.Module):
    """Convolutions of volumes: strided, by channel, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv3d(2, 18, 3, (1, 2, 2), 1), nn.Conv3d(18, 18, 3, padding=1, groups=18)
        self.up, self.head = nn.ConvTranspose3d(18, 4, 2, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2, 4, 6, 8] -> [B, 3]."""
        y: Tensor = self.head(self.up(self.each(self.first(x).relu()).relu()).mean((2, 3, 4)))
        return y


@pytest.mark.parametrize(("network", "scheme"), [(Images, "W8A8_STATIC"), (Images, "W8A8"), (Volumes, "W4A16_C")])
def test_kinds(network: type[nn.Module], scheme: str) -> None:
    torch.manual_seed(0)
    x = torch.randn((4, 3, 10, 8) if network is Images else (4, 2, 4, 6, 8))
    module = network().eval().requires_grad_(False)
    graph = capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=1)},))
    classes = tuple({type(part).__name__ for part in module.children()})
    samples = Samples(x, torch.empty(0), "", "by chance")
    graph = Rtn(scheme, targets=classes).run(graph, Context(samples=samples))
    assert relative_error(graph(x), module(x)) < (0.4 if "W4" in scheme else 0.1)
    library = compile_graph(graph, X86(), tune="off")
    families = [kernel["family"] for kernel in library.kernels]
    assert families.count("depthwise") == (2 if network is Images else 1)
    for batch in (1, 3):
        got, expected = Program(graph, library)(x[:batch]), graph(x[:batch])
        # Activations that lie between two codes may get the other one, and all that follows with them.
        assert relative_error(torch.from_numpy(got), expected) < (1e-2 if "A8" in scheme else 1e-5)
