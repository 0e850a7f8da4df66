"""Convolutions of every kind are linears over patches or depthwise: against PyTorch, one layer after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compressor.capture.capture import capture
from compressor.capture.convolution.rewrite import dense_convolutions
from compressor.data.text import Samples
from compressor.formats.format import Format
from compressor.graph.sites import weight_sites
from compressor.numerics.channels.obs import quantize_channels
from compressor.passes.gptq import Gptq
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.verify.independence.check import check_independence

TOLERANCE = 1e-5  # of the largest output

# Layer -> (outputs, inputs) of its weight as stored, of each site; "depthwise" where each row reads its own channel.
CASES: dict[str, tuple[nn.Module, tuple[int, ...], str, tuple[int, int]]] = {
    "2 wide groups": (nn.Conv2d(6, 36, 3, 2, 1, groups=2), (2, 6, 7, 8), "2 linears", (18, 27)),
    "narrow groups": (nn.Conv2d(12, 8, (3, 2), (1, 2), (1, 0), (2, 1), 4), (2, 12, 7, 8), "depthwise", (8, 18)),
    "narrow and dilated": (nn.Conv2d(4, 6, 3, dilation=2, groups=2), (2, 4, 7, 8), "2 linears", (3, 18)),
    "two outputs a channel": (nn.Conv2d(5, 10, 3, 2, 1, 2, groups=5), (2, 5, 9, 8), "depthwise", (10, 9)),
    "groups of pixels": (nn.Conv2d(4, 40, 1, groups=2, bias=False), (2, 4, 3, 3), "2 linears", (20, 2)),
    "groups of rows": (nn.Conv1d(6, 4, 3, padding=1, groups=2), (2, 6, 9), "depthwise", (4, 9)),
    "even kernel": (nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(1, 2)), (2, 3, 6, 7), "1 linears", (4, 18)),
    "even kernel of rows": (nn.Conv1d(3, 4, 4, padding="same"), (2, 3, 9), "1 linears", (4, 12)),
    "volumes": (nn.Conv3d(3, 5, (3, 2, 3), (2, 1, 2), (1, 0, 2), (1, 2, 1)), (2, 3, 7, 6, 5), "1 linears", (5, 54)),
    "volumes, same": (nn.Conv3d(2, 3, (2, 3, 1), padding="same"), (2, 2, 4, 5, 6), "1 linears", (3, 12)),
    "volumes by channel": (nn.Conv3d(4, 4, 3, padding=1, groups=4), (2, 4, 5, 4, 6), "depthwise", (4, 27)),
    "turned": (nn.ConvTranspose2d(3, 4, 4, 2, 1), (2, 3, 4, 5), "1 linears", (16, 12)),
    "turned, uneven": (nn.ConvTranspose2d(3, 4, (3, 2), (2, 3), (1, 0), (1, 2)), (2, 3, 4, 5), "1 linears", (24, 12)),
    "turned, stride 1": (nn.ConvTranspose2d(3, 4, 3, 1, 3, 1, dilation=2), (2, 3, 6, 7), "1 linears", (4, 27)),
    "turned by channel": (nn.ConvTranspose2d(6, 6, 4, 2, 1, groups=6), (2, 6, 4, 5), "depthwise", (24, 4)),
    "turned in groups": (nn.ConvTranspose2d(4, 8, 2, 2, groups=2), (2, 4, 4, 5), "2 linears", (16, 2)),
    "turned rows": (nn.ConvTranspose1d(3, 4, 5, 3, 2, 1), (2, 3, 6), "1 linears", (12, 6)),
    "turned volumes": (nn.ConvTranspose3d(2, 3, 2, 2), (2, 2, 3, 4, 2), "1 linears", (24, 2)),
}  # fmt: skip


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


class Normed(nn.Module):
    """A layer and a batch norm, which is folded into it."""

    def __init__(self, layer: nn.Module, dims: int) -> None:
        super().__init__()
        outputs: int = layer.out_channels  # type: ignore[assignment]
        self.layer, self.norm = layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.layer(x))
        return result


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_a_site(case: str) -> None:
    layer, shape, kind, stored = CASES[case]
    torch.manual_seed(0)
    module, x = Normed(layer, len(shape) - 2).requires_grad_(False), torch.randn(shape)
    for value in (module.norm.running_mean, module.norm.running_var, module.norm.weight, module.norm.bias):
        value.copy_(torch.rand(value.shape) + 0.2)
    module.eval()
    graph = capture(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert error(graph(x), module(x)) < TOLERANCE
    assert error(graph(x[:1]), module(x[:1])) < TOLERANCE
    assert dense_convolutions(graph) == [] and "norm" not in str(graph.graph)
    sites = weight_sites(graph)
    assert {(site.out_features, site.in_features) for site in sites} == {stored}
    assert kind == ("depthwise" if sites[0].is_depthwise else f"{len(sites)} linears")
    assert {site.module_class for site in sites} == {type(layer).__name__}
    assert all(site.name == "layer" or site.name.startswith("layer.group_") for site in sites)
    assert check_independence(graph).independent
    planned = capture(module, (x,), weights=False)
    assert {n: v.shape for n, v in planned.named_parameters()} == {n: v.shape for n, v in graph.named_parameters()}
    packed = Rtn("W8A16_C", targets=(type(layer).__name__,)).run(graph, Context())
    assert 1e-5 < error(packed(x), module(x)) < 0.02


class Filters(nn.Module):
    """Depthwise between convolutions of 1 x 1, as MobileNets have them, and narrow groups."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.filter = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.narrow, self.head = nn.Conv2d(12, 8, 3, groups=4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 4]."""
        y = nn.functional.relu6(self.filter(nn.functional.relu6(self.expand(x))))
        result: Tensor = self.head(self.narrow(y).relu().mean((2, 3)))
        return result


def test_gptq_has_a_hessian_for_each_channel() -> None:
    """The first depthwise one reads the dense model's inputs: its codes are those of Hessians made by unfold."""
    torch.manual_seed(0)
    module, x = Filters().eval().requires_grad_(False), torch.randn(24, 3, 9, 8).cumsum(3) / 3
    context = Context(samples=Samples(x, torch.empty(0), "", "by chance"))
    shapes, targets = ({0: torch.export.Dim("batch", min=1)},), ("Conv2d", "Linear")
    packed = Gptq("W3A16_C", ("filter", "narrow", "head"), match_dense=True).run(
        capture(module, (x[:2],), dynamic_shapes=shapes), context
    )
    rows = nn.functional.unfold(nn.functional.relu6(module.expand(x)), 3, padding=1).view(24, 12, 9, -1)
    rows = rows.permute(1, 2, 0, 3).reshape(12, 9, -1)
    hessian, weight = 2 / rows.shape[2] * rows @ rows.mT, module.filter.weight.reshape(12, 9)
    expected, _ = quantize_channels(
        weight, hessian, Format.parse("W3A16_C"), actorder=True, dampening_frac=0.01, observer="mse"
    )
    same = packed.get_parameter("filter.codes") == expected.parts["codes"]
    assert float(same.double().mean()) > 0.99  # sums of the Hessians come in another order
    by_site = {record.site: record for record in context.records}
    assert set(by_site) == {"filter", "narrow", "head"}
    assert all(record.error < 0.8 * record.rtn_error for record in by_site.values())
    planned = Gptq("W3A16_C", targets).plan(capture(module, (x[:2],), weights=False), context)
    assert [plan.format for plan in planned] == ["W3A16_C"] * 4
