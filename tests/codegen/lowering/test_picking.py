"""Places of a tensor against PyTorch: negative ones, several index tensors, sizes that vary."""

from __future__ import annotations

import torch
import tvm
from torch import Tensor, nn
from torch.export import Dim
from tvm import relax

from compressor.capture.capture import capture
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86


class Picks(nn.Module):
    """Pick from x [B, N, 8] by numbers, and by the numbers i [B, N] from 0 to 1."""

    def forward(self, x: Tensor, i: Tensor) -> dict[str, Tensor]:
        rows, length = torch.arange(x.shape[0]), x.shape[1]
        return {
            "last token": x[:, -1], "last but one": x[..., -2, :], "last channel": x[..., -1], "last text": x[-1],
            "a token": x[:, 2], "by its size": x[:, length - 1], "last two": x.narrow(1, -2, 2),
            "first": x[:, :1] - 2, "inner": x[:, 1:3] - 1, "end": x[:, -2:] - 1,
            "listed": x[:, [-1, 0]], "pairs": x[rows, -1], "last of each": x[rows, length - 1 - i.argmax(-1)],
            "negative": x[i - 2], "one dimension": x[:, :, i[0, :3] - 2], "zipped": x[:, i[0, :4], i[1, :4]],
            "apart": x[i[:, :1] - 2, :, i[0, :4]], "marked": x.index_put([i > 0], x.new_tensor(3.0)),
        }  # fmt: skip


def test_places_are_those_of_pytorch_whatever_the_sizes() -> None:
    shapes = ({0: Dim("batch", min=2), 1: Dim("length", min=4)},) * 2
    graph = capture(Picks(), (torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64)), dynamic_shapes=shapes)
    vm = relax.VirtualMachine(compile_graph(graph, X86(), tune="off").executable, tvm.cpu())
    rng = torch.Generator().manual_seed(0)
    for batch, length in ((2, 5), (3, 9)):
        x = torch.randn(batch, length, 8, generator=rng)
        i = torch.randint(0, 2, (batch, length), generator=rng)
        found = vm["main"](*(tvm.runtime.tensor(given.numpy()) for given in (x, i)), [])
        for name, mine, expected in zip(graph.meta["outputs"], found, Picks()(x, i).values(), strict=True):
            assert torch.equal(torch.from_numpy(mine.numpy()), expected), (name, batch, length)


def test_places_out_of_range_are_the_nearest() -> None:
    """An index from outside must not read foreign memory."""

    class Rows(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
            return x[i], x[i, i]

    graph = capture(Rows(), (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64)))
    vm = relax.VirtualMachine(compile_graph(graph, X86(), tune="off").executable, tvm.cpu())
    x, i = torch.randn(4, 4), torch.tensor([10**12, -(10**12), -4])
    found = vm["main"](tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(i.numpy()), [])
    nearest = torch.tensor([3, 0, 0])
    for mine, expected in zip(found, (x[nearest], x[nearest, nearest]), strict=True):
        assert torch.equal(torch.from_numpy(mine.numpy()), expected)
