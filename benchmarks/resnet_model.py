"""ResNets of CIFAR-10 in plain PyTorch, for benchmarks/resnet.py and for the other runtimes' environments."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad, relu


class Block(nn.Module):
    """Two convolutions beside a shortcut of option A."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = outputs // inputs, (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        if self.added:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return relu(y + x)


class ResNet(nn.Module):
    """6 n + 2 layers: a convolution, three stages of n blocks with 16, 32 and 64 channels, a linear."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32), *(Block(32, 32) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64), *(Block(64, 64) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 3, 32, 32] to [B, 10]."""
        x = self.layer3(self.layer2(self.layer1(relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.linear(avg_pool2d(x, x.shape[3]).flatten(1))
        return result


def load_resnet(weights: Path) -> ResNet:
    """Load the ResNet with these weights, for inference."""
    state = load_file(weights)
    module = ResNet(len({name.split(".")[1] for name in state if name.startswith("layer1.")}))
    module.load_state_dict(state)
    return module.eval().requires_grad_(False)
