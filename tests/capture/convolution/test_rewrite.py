"""Convolutions are linears over patches, batch norms are folded: against PyTorch; what is neither is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.capture.capture import capture
from compressor.capture.convolution.rewrite import dense_convolutions
from compressor.data.text import Samples
from compressor.formats.packing import dequantize
from compressor.graph.folding import CannotFold, find_scale_target
from compressor.graph.sites import linear_sites, packed_weight_sites, weight_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.rtn import Rtn
from compressor.passes.smoothquant import Smoothquant
from compressor.pipeline.context import Context
from compressor.pipeline.sites import choose_format
from compressor.verify.independence.check import check_independence

TOLERANCE = 1e-5  # of the largest output


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def prepared(module: nn.Module) -> nn.Module:
    """Weights and statistics by chance, for inference."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                for value in (part.running_mean, part.running_var, part.weight, part.bias):
                    if value is not None:
                        value.copy_(torch.rand(value.shape, generator=rng) + 0.1)
            elif isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear):
                for parameter in part.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=rng) / 5)
    return module.eval().requires_grad_(False)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=40)
@given(pairs, pairs, st.tuples(st.integers(0, 2), st.integers(0, 2)), pairs, st.integers(1, 4), st.integers(7, 9))
def test_a_convolution_is_a_linear_over_patches(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
    channels: int, size: int,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(channels)
    x = torch.randn(2, channels, size, size + 2, generator=rng, dtype=torch.float64)
    weight = torch.randn(5, channels, *kernel, generator=rng, dtype=torch.float64)
    rows = torch.ops.compressor.patches(x.permute(0, 2, 3, 1), kernel, stride, padding, dilation)
    got = (rows @ weight.permute(0, 2, 3, 1).reshape(5, -1).t()).permute(0, 3, 1, 2)
    expected = functional.conv2d(x, weight, None, stride, padding, dilation)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    fake = torch.ops.compressor.patches(x.permute(0, 2, 3, 1).to("meta"), kernel, stride, padding, dilation)
    assert fake.shape == rows.shape


class Residual(nn.Module):
    """What ResNets are made of: two convolutions, batch norms, a strided shortcut, pooling, a linear."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.first_norm = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12, affine=False)
        self.second, self.second_norm = nn.Conv2d(12, 12, 3, padding="same", bias=False), nn.BatchNorm2d(12)
        self.short, self.short_norm = nn.Conv2d(8, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12)
        self.linear, self.relu = nn.Linear(12, 5), nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        x = self.relu(y + self.short_norm(self.short(x)))
        result: Tensor = self.linear(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return result


def test_batch_norms_are_folded_and_channels_stay_last() -> None:
    module, x = prepared(Residual(inplace=True)), images(3, 3, 9, 8)  # in place, batch norm is another operator
    graph = capture(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert error(graph(x), module(x)) < TOLERANCE
    called = targets(graph)
    assert not any("norm" in name or "conv" in name for name in called)
    assert sum("permute" in name for name in called) == 2  # into the first convolution, out of the last
    assert [(site.name, site.module_class, site.in_features) for site in linear_sites(graph)] == [
        ("stem", "Conv2d", 27), ("first", "Conv2d", 72), ("second", "Conv2d", 108), ("short", "Conv2d", 8),
        ("linear", "Linear", 12),
    ]  # fmt: skip
    assert {name.rpartition(".")[2] for name, _ in graph.named_parameters()} == {"weight", "bias"}
    planned = capture(module, (x,), weights=False)
    shapes = {name: value.shape for name, value in graph.named_parameters()}
    assert {name: value.shape for name, value in planned.named_parameters()} == shapes
    assert all(value.is_meta for value in planned.parameters())


class Alone(nn.Module):
    """Batch norms that no weight can take in: in front of a convolution, behind one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.twice, self.after = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.linear, self.flat = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(torch.relu(self.before(x)))
        result: Tensor = self.flat(self.linear((y * torch.sigmoid(self.after(y))).mean((2, 3))))
        return result


def test_other_batch_norms_become_a_product_and_a_sum() -> None:
    module, x = prepared(Alone()), images(2, 3, 6, 6)
    graph = capture(module, (x,))
    assert error(graph(x), module(x)) < TOLERANCE
    names = dict(graph.named_parameters())
    assert {"before.scale", "before.shift", "after.scale", "after.shift"} < set(names)
    assert not any("norm" in name for name in targets(graph)) and "flat.scale" not in names  # the linear took that in


class Depthwise(nn.Module):
    """Depthwise convolutions with batch norms: of images, and of rows beside ordinary ones of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(6, 6, (3, 5), (1, 2), (2, 0), (2, 1), groups=6, bias=False), nn.BatchNorm2d(6)
        self.rows, self.after = nn.Conv1d(6, 10, 3, padding=1, bias=False), nn.BatchNorm1d(10)
        self.each = nn.Conv1d(10, 10, 5, 2, "valid", 1, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self.norm(self.wide(x)))
        y = torch.relu(self.after(self.rows(y.mean(3))))
        result = functional.hardtanh(self.each(y), 0.0, 2.0)
        return result


def test_depthwise_convolutions_and_those_of_rows_are_sites() -> None:
    module, x = prepared(Depthwise()), images(2, 6, 14, 11)
    graph = capture(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert error(graph(x), module(x)) < TOLERANCE
    sites = {site.name: site for site in weight_sites(graph)}
    shapes = {name: (site.module_class, site.out_features, site.in_features) for name, site in sites.items()}
    assert shapes == {"wide": ("Conv2d", 6, 15), "rows": ("Conv1d", 10, 18), "each": ("Conv1d", 10, 5)}
    assert [site.name for site in linear_sites(graph)] == ["rows"]
    assert dense_convolutions(graph) == []
    assert not any("norm" in name for name in targets(graph))
    assert check_independence(graph).independent
    folded = graph.get_parameter("wide.weight").detach().clone()
    packed = Rtn("W8A8_STATIC", ("Conv2d", "Conv1d")).run(graph, Context(samples=Samples(x, torch.empty(0), "", "")))
    assert [site.name for site in packed_weight_sites(packed)] == ["wide", "rows", "each"]
    assert torch.equal(packed.get_parameter("wide.codes"), rtn_quantize(folded, choose_format("W8A8")).parts["codes"])
    assert 1e-4 < error(packed(x), module(x)) < 0.05
    assert check_independence(packed).independent


def test_a_depthwise_convolution_rounds_what_it_reads() -> None:
    """By hand: of one scale for all, the definition is a convolution of rounded images and weights."""
    fmt, rng = choose_format("W8A8_STATIC"), torch.Generator().manual_seed(0)
    weight, x = torch.randn(5, 9, generator=rng), torch.randn(2, 6, 7, 5, generator=rng)
    scale = torch.tensor([0.03])
    packed = rtn_quantize(weight, fmt).with_input_scale(scale)
    rows = torch.ops.compressor.patches(x, [3, 3], [2, 1], [1, 1], [1, 1])
    got = torch.ops.compressor.packed_depthwise(rows, list(packed.parts.values()), None, fmt.name, 9, 5)
    rounded = (torch.round((x / scale).clamp(-127, 127)) * scale).permute(0, 3, 1, 2)
    kernel = dequantize(packed).view(5, 1, 3, 3)
    expected = functional.conv2d(rounded, kernel, None, (2, 1), 1, 1, 5).permute(0, 2, 3, 1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.up = nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, 2, dilation=2)
        self.row, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.shared(self.shared(self.norm(x))))
        return result + self.row(x.mean(3)).mean() + functional.conv2d(x, x[:1]).mean()


def test_what_is_no_linear_over_patches_stays_and_is_named() -> None:
    module, x = prepared(Refused()), images(2, 4, 7, 7)
    graph = capture(module, (x,))
    assert error(graph(x), module(x)) < TOLERANCE
    assert [site.name for site in linear_sites(graph)] == ["row"]
    reasons = dense_convolutions(graph)
    assert [line.partition(":")[0] for line in reasons] == ["shared", "shared", "up", "conv2d_2"]
    for line, word in zip(reasons, ("shared", "shared", "stride and dilation", "computed"), strict=True):
        assert "stays dense" in line and word in line


def test_round_to_nearest_stores_the_folded_weight() -> None:
    module, x = prepared(Residual()), images(2, 3, 8, 8)
    graph, fmt = capture(module, (x,)), choose_format("W4A16_C")
    folded = graph.get_parameter("second.weight").detach().clone()
    scale = module.second_norm.weight * (module.second_norm.running_var + module.second_norm.eps).rsqrt()
    by_hand = (module.second.weight * scale.view(-1, 1, 1, 1)).permute(0, 2, 3, 1).reshape(12, -1)
    torch.testing.assert_close(folded, by_hand, rtol=1e-6, atol=1e-7)
    graph = Rtn(fmt.name, targets=("Conv2d",)).run(graph, Context())
    expected = rtn_quantize(folded, fmt)
    assert torch.equal(graph.get_parameter("second.codes"), expected.parts["codes"])
    weight = dequantize(expected).view(12, 3, 3, 12).permute(0, 3, 1, 2)
    bias = graph.get_parameter("second.bias")
    node = next(n for n in graph.graph.nodes if n.op == "get_attr" and n.target == "second.codes")
    (site,) = node.users
    rows = images(2, 4, 4, 12)
    patches = torch.ops.compressor.patches(rows, [3, 3], [1, 1], [1, 1], [1, 1])
    parts = [graph.get_parameter(f"second.{part}") for part in ("codes", "scales")]
    got = torch.ops.compressor.packed_linear(patches, parts, bias, *site.args[-3:])
    assert error(got.permute(0, 3, 1, 2), functional.conv2d(rows.permute(0, 3, 1, 2), weight, bias, 1, 1)) < TOLERANCE


def test_channels_of_patches_are_scaled_where_a_convolution_makes_them() -> None:
    module, x = prepared(Residual()), images(4, 3, 8, 8)
    graph = capture(module, (x,))
    sites = {site.name: site for site in linear_sites(graph)}
    target, readers = find_scale_target(graph, sites["second"].input)
    assert target.parameters == ("first.weight", "first.bias") and target.shares == (1, 9, 12)
    assert [site.name for site in readers] == ["second"]
    for name in ("stem", "first", "short", "linear"):
        with pytest.raises(CannotFold):
            find_scale_target(graph, sites[name].input)
    context = Context(samples=Samples(x, torch.empty(0), "", "by chance"))
    smooth = Smoothquant(targets=("Linear", "Conv2d")).run(graph, context)
    smooth.recompile()
    assert error(smooth(x), module(x)) < TOLERANCE
    assert "second" not in " ".join(context.notes) and len(context.notes) == 4
