"""Tiny models of 14 kinds that structured pruning has to understand, captured, with samples and what they cost."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from captures import capture_once
from families import DECODERS, ENCODERS, LENGTH, VOCAB, make
from packed_models import random_samples
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.data.text import Samples
from compressor.graph.caches import empty_past
from compressor.graph.dependencies.channels import Dependencies, Family
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.sites import linear_sites, weight_sites

relu = nn.functional.relu


def conv(i: int, o: int, k: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, **options), nn.BatchNorm2d(o))


class OptionA(nn.Module):
    """Two stages of a ResNet whose shortcut cuts places and pads channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 8), conv(8, 8), conv(8, 8)
        self.third, self.fourth, self.head = conv(8, 16, stride=2), conv(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.stem(x))
        x = relu(x + self.second(relu(self.first(x))))
        shortcut = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        return self.head(relu(shortcut + self.fourth(relu(self.third(x)))).mean((2, 3)))


class Mobile(nn.Module):
    """Inverted residuals: wide, depthwise, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.deep = conv(3, 8), conv(8, 24, 1), conv(24, 24, groups=24)
        self.narrow, self.head = conv(24, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.stem(x))
        wide = nn.functional.relu6(self.wide(x))
        return self.head((x + self.narrow(nn.functional.relu6(self.deep(wide)))).mean((2, 3)))


class Unet(nn.Module):
    """Down, up, and side by side with what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = conv(3, 8), conv(8, 12, stride=2), conv(12, 6, 1)
        self.join, self.last = conv(14, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = relu(self.first(x))
        up = nn.functional.interpolate(self.up(relu(self.down(first))), scale_factor=2)
        return self.last(relu(self.join(torch.cat([first, up], dim=1))))


class Twice(nn.Module):
    """A tensor beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.join, self.head = conv(3, 10), conv(20, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.first(x))
        return self.head(relu(self.join(torch.cat([x, x], dim=1))).mean((2, 3)))


class Grouped(nn.Module):
    """A convolution in groups, which go whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped, self.last = conv(3, 16), conv(16, 24, groups=8), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(relu(self.grouped(relu(self.first(x)))))


class Vit(nn.Module):
    """A block of a ViT whose queries, keys and values are one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 24, 4, 4), nn.LayerNorm(24)
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.fc1, self.fc2, self.head = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return self.head((x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))).mean(1))


IMAGES: dict[str, type[nn.Module]] = {
    "ResNet": OptionA,
    "MobileNet": Mobile,
    "U-Net": Unet,
    "beside itself": Twice,
    "in groups": Grouped,
    "ViT": Vit,
}
SEVEN = {**DECODERS["Llama"][1], "hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 7, "head_dim": 8}
TEXTS = ["Llama", "Qwen 3", "Mistral", "GPT-2", "OPT", "BERT", "seven groups", "Mixtral"]
PICTURES = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 3, 16, 16))).float()


def module(name: str) -> nn.Module:
    """Return a random model, for inference; batch norms have statistics."""
    if name == "seven groups":
        return make("Llama", SEVEN, True)
    if name not in IMAGES:
        return make(*(DECODERS if name in DECODERS else ENCODERS)[name], name in DECODERS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = IMAGES[name]()
    for _ in range(3):
        model(PICTURES)
    return model.eval()


@functools.cache
def _captured(name: str) -> GraphModule:
    return capture_once(module(name), *([PICTURES[:4]] if name in IMAGES else []))


def captured(name: str) -> GraphModule:
    """Return a graph to change; its parameters stay as they are."""
    return clone_graph(_captured(name))


def samples_of(name: str) -> Samples:
    """Return what a model is calibrated on."""
    if name in IMAGES:
        return Samples(PICTURES, torch.zeros(0), "pictures", "random pictures")
    return random_samples(VOCAB, 32)


def output(graph: GraphModule, name: str) -> Tensor:
    """Return logits, or hidden states of an encoder."""
    if name in IMAGES:
        return graph(PICTURES[:4])  # type: ignore[no-any-return]
    info, ids = graph.meta["model"], torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    position = torch.arange(LENGTH)
    if info.kind == "encoder":
        found = graph(ids, torch.ones(2, LENGTH))
    else:
        found = graph(ids, position, position, *empty_past(info, 2))
    return found if isinstance(found, Tensor) else found[0]


def free(graph: GraphModule) -> list[Family]:
    """List the families of channels, heads among them, that can go and that linears or convolutions read."""
    columns = {(site.weight_name, 1) for site in linear_sites(graph)}
    return [
        family
        for family in Dependencies(graph).families()
        if not family.reason and family.count > 1 and len(family.places) > 1 and family.places.keys() & columns
    ]


def costs(graph: GraphModule) -> dict[str, float]:
    """Count products of linears and convolutions for the inputs of the capture, numbers and bytes of parameters."""
    macs = 0.0
    for site in weight_sites(graph):
        is_expert = ".experts." in site.name
        index: Any = site.input.args[1] if is_expert else site.node  # [tokens, experts of one], or [..., out]
        sizes = [size if isinstance(size, int) else size.node.hint for size in index.meta["val"].shape]
        rows = np.prod(sizes) / DECODERS["Mixtral"][1]["num_local_experts"] if is_expert else np.prod(sizes[:-1])
        macs += float(rows) * site.out_features * site.in_features
    return {"macs": macs, "parameters": sum(p.numel() for p in graph.parameters()), "weight_bytes": weight_bytes(graph)}
