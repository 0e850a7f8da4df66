"""Networks of the shape of MobileNetV2 (Sandler et al. 2018, table 2) and MobileNetV1 (Howard et al. 2017, table 1) in
plain PyTorch, their weights by chance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks, stride of the first block."""


def layer(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, batch norm, ReLU6."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


class Block(nn.Module):
    """Expand by a convolution of 1 x 1, filter each channel alone, project; beside a shortcut where shapes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = inputs * expansion
        first = layer(inputs, wide, 1) if expansion > 1 else []
        self.layers = nn.Sequential(*first, *layer(wide, wide, 3, stride, wide), *layer(wide, outputs, 1)[:2])
        self.is_added = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        y: Tensor = self.layers(x)
        return x + y if self.is_added else y


class MobileNetV2(nn.Module):
    """Images of three channels to 1,000 logits."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inputs = list[nn.Module](), 32
        for expansion, outputs, count, stride in STAGES:
            for i in range(count):
                blocks.append(Block(inputs, outputs, expansion, stride if i == 0 else 1))
                inputs = outputs
        self.features = nn.Sequential(*layer(3, 32, 3, 2), *blocks, *layer(inputs, 1280, 1))
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 224, 224] -> [B, 1000]."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


FIRST = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Of MobileNetV1: outputs of a pair of convolutions, and the stride of its depthwise one."""


class MobileNetV1(nn.Module):
    """Images of three channels to 1,000 logits, without shortcuts: all but 5% of the products are pointwise."""

    def __init__(self) -> None:
        super().__init__()
        layers, inputs = layer(3, 32, 3, 2), 32
        for outputs, stride in FIRST:
            layers += [*layer(inputs, inputs, 3, stride, inputs), *layer(inputs, outputs, 1)]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 224, 224] -> [B, 1000]."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def random_mobilenet(seed: int = 0, kind: type[nn.Module] = MobileNetV2) -> nn.Module:
    """Make the network for inference; the statistics of its batch norms are those of random images."""
    torch.manual_seed(seed)
    network = kind().requires_grad_(False)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the mean over batches
    network.train()
    network(torch.randn(8, 3, 224, 224))
    return network.eval()
