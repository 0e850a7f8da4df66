"""Tiny random image classifiers and pictures, as Hugging Face folders and folders of classes hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

CLASSES = ("cat", "dog", "bird")  # not in the order of the alphabet
SIDE = 32
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 8,
}
NAMED = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.25, 0.5, 0.5],
    "resample": 2,
}


def classifier(config: Any, architecture: str = "") -> nn.Module:
    """Build a random classifier whose weights are large enough for every layer to matter."""
    kind = getattr(transformers, architecture) if architecture else transformers.AutoModelForImageClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (kind(config) if architecture else kind.from_config(config)).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if "running" in name:  # as after training
                buffer.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


def resnet(stages: int = 2) -> Any:
    """Return the configuration of a ResNet of one block a stage."""
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16][:stages], depths=[1, 1][:stages], layer_type="basic", **NAMED
    )


def save(model: nn.Module, folder: Path, **changes: Any) -> Path:
    """Save a classifier with its preprocessor; a change to None leaves a key out."""
    model.save_pretrained(folder)  # type: ignore[operator]
    content = {key: value for key, value in {**PREPROCESSOR, **changes}.items() if value is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def pictures(folder: Path, count: int = 4, shape: tuple[int, int] = (40, 50)) -> Path:
    """Write ``count`` random pictures of each class, PNG and JPEG in turns."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
            image.fromarray(pixels).save(folder / name / f"{number}.{('png', 'jpg')[number % 2]}")
    return folder
