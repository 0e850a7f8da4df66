"""Channels that belong together are found in models of many kinds, and those that nothing reads go without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import DECODERS, ENCODERS, LENGTH, VOCAB, make
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites


def free(graph: GraphModule) -> list[Family]:
    """Return the families that linears write and read, but for heads."""
    sites = linear_sites(graph)
    rows, columns = {(site.weight_name, 0) for site in sites}, {(site.weight_name, 1) for site in sites}
    return [
        f
        for f in Dependencies(graph).families()
        if not f.reason and not f.groups and f.places.keys() & rows and f.places.keys() & columns
    ]


def remove_unread(graph: GraphModule, share: float) -> tuple[GraphModule, list[tuple[Family, int]]]:
    """Zero what reads a share of all free channels, in place, and return a graph without them."""
    random, chosen = np.random.default_rng(0), []
    for family in free(graph):
        gone = np.sort(random.permutation(family.count)[: int(share * family.count)])
        chosen.append((family, gone))
        for (name, axis), entries in family.places.items():
            weight = graph.get_parameter(name)
            if axis == 1:
                with torch.no_grad():
                    weight[:, torch.from_numpy(entries[gone]).flatten()] = 0
    smaller = clone_graph(graph)
    Dependencies(smaller).remove(chosen)
    return smaller, [(family, len(gone)) for family, gone in chosen]


def text_inputs(graph: GraphModule) -> tuple[object, ...]:
    info, ids = graph.meta["model"], torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    if info.kind == "encoder":
        return ids, torch.ones(2, LENGTH)
    position = torch.arange(LENGTH)
    empty = [torch.zeros(2, info.kv_heads, 1, info.head_dim) for _ in range(2 * info.layers)]
    return ids, position, position, empty[: info.layers], empty[info.layers :]


@pytest.mark.parametrize("name", ["Llama, tied", "GPT-2", "Phi 3", "BERT", "ModernBERT"])
def test_feed_forward_channels_of_text_models(name: str) -> None:
    decoder = name in DECODERS
    graph = capture(make(*(DECODERS if decoder else ENCODERS)[name], decoder))
    inputs = text_inputs(graph)
    smaller, removed = remove_unread(graph, 0.4)
    assert len(removed) == 2  # one a layer
    before, after = (sum(p.numel() for p in g.parameters()) for g in (graph, smaller))
    sizes = {name: list(p.shape) for name, p in graph.named_parameters()}
    gone = 0
    for family, count in removed:
        for (name, axis), entries in family.places.items():
            gone += count * entries.shape[1] * int(np.prod(sizes[name])) // sizes[name][axis]
    assert before - after == gone > 0
    with torch.no_grad():
        expected, found = (g(*inputs) for g in (graph, smaller))
    expected, found = (out if isinstance(out, Tensor) else out[0] for out in (expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """A block of a ResNet whose shortcut cuts places and pads channels (option A)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.third, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.first(x))
        b = self.third(torch.relu(self.second(a)))
        shortcut = nn.functional.pad(a[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        return self.head(torch.relu(b + shortcut).mean((2, 3)))


class UNet(nn.Module):
    """Two paths that are put side by side, one of them a tensor beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.join, self.last = nn.Conv2d(22, 12, 3, padding=1), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down(x))
        joined = torch.cat([a, self.up(a), a], dim=1)
        return self.last(torch.relu(self.join(joined)))


class Separable(nn.Module):
    """A depthwise convolution between two of 1x1."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.project = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(nn.functional.relu6(self.depthwise(nn.functional.relu6(self.expand(x)))))


class Split(nn.Module):
    """A gate in the second half of a linear, whose other half it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(6, 32), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, dim=-1)
        return self.out(a * torch.sigmoid(b))


class Heads(nn.Module):
    """Channels that are cut into heads: whole ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.relu(self.inner(x)).view(-1, 4, 6).transpose(1, 2)
        return self.out((heads * 2).transpose(1, 2).reshape(-1, 24))


MODULES: dict[type[nn.Module], tuple[tuple[int, ...], list[tuple[int, dict[str, int]]]]] = {
    UNet: (
        (2, 3, 6, 6),
        [(8, {"down": 1, "up": 1, "join": 18}), (6, {"up": 1, "join": 9}), (12, {"join": 1, "last": 1})],
    ),
    Separable: ((2, 3, 6, 6), [(12, {"expand": 1, "depthwise": 1, "project": 1})]),
    Split: ((4, 6), [(16, {"both": 2, "out": 1})]),
    Residual: (
        (2, 3, 8, 8),
        [
            (8, {"first": 1, "second": 9, "third": 1, "head": 1}),
            (16, {"second": 1, "third": 9}),
            (8, {"third": 1, "head": 1}),  # beside zeros that the shortcut adds
        ],
    ),
    Heads: ((4, 6), [(4, {"inner": 6, "out": 6})]),
}
"""A module -> the shape of its input, and its families: channels, and entries of one in each weight."""


@pytest.mark.parametrize("build", MODULES)
def test_channels_of_other_modules(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    shape, expected = MODULES[build]
    graph, x = capture(build().eval(), torch.randn(shape)), torch.randn(shape)
    smaller, removed = remove_unread(graph, 0.4)
    torch.testing.assert_close(smaller(x), graph(x), rtol=1e-5, atol=1e-5)
    assert all(count for _, count in removed)
    weights = [
        {n.rpartition(".")[0]: e.shape[1] for (n, _), e in f.places.items() if n.endswith("weight")} for f, _ in removed
    ]
    assert [(f.count, found) for (f, _), found in zip(removed, weights, strict=True)] == expected
    for node in smaller.graph.nodes:  # what is known of the values is what they are
        if node.op == "get_attr":
            assert node.meta["val"].shape == smaller.get_parameter(str(node.target)).shape


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cumsum(self.inner(x), dim=-1))


def test_an_operator_without_a_rule_is_named_with_its_line() -> None:
    dependencies = Dependencies(capture(Sorted().eval(), torch.randn(4, 6)))
    family = next(f for f in dependencies.families() if ("inner.weight", 0) in f.places)
    assert "no rule says what aten.cumsum.default does to it" in family.reason
    assert "test_channels.py:" in family.reason
    with pytest.raises(ValueError, match="have to stay"):
        dependencies.remove([(family, np.array([0]))])
