"""Build the program of an image classifier: pixels in, logits out, for any number of images of one size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from compressor.errors import CaptureError
from compressor.graph.model import PREPROCESSOR
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LARGEST_SIDE = 4096


class ImageProgram(nn.Module):
    """The classifier's contract: images float32 [B, channels, height, width] -> logits float32 [B, classes]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Call the model."""
        return cast(Tensor, self.hf(pixel_values=pixel_values).logits)


def is_image_classifier(config: PreTrainedConfig, architecture: str, place: str) -> bool:
    """Return whether a configuration names an image classifier.

    Raises:
        CaptureError: it names another model of images, such as a body without a classifier.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
    )

    named = CLASSIFIERS.get(config.model_type, ())
    classes = (named,) if isinstance(named, str) else tuple(named)
    if architecture in classes or architecture.endswith("ForImageClassification"):
        return True
    # A body (ViTModel) or another head: all that these configurations have in common is that they have no words.
    if classes and not getattr(config, "vocab_size", None):
        raise CaptureError(
            f"{place}: {architecture or config.model_type} is a model of images without a classifier; image "
            f"classifiers are covered ({classes[0]}): save it as one, or capture it as a module with example inputs"
        )
    return False


def image_program(
    model: PreTrainedModel, folder: Path | None, place: str
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return a classifier's program, two example images by chance, and its ``dynamic_shapes``: any number of images.

    Raises:
        CaptureError: the model reads no pixels, or nothing says of which size.
    """
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        raise CaptureError(f"{place}: {type(model).__name__}.forward takes no pixel_values")
    channels = getattr(model.config, "num_channels", None)
    height, width = image_size(model.config, folder, place)
    shape = (2, channels if type(channels) is int else 3, height, width)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return ImageProgram(model), (images,), ({0: Dim("batch", min=1)},)


def class_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of the classes in their order; empty where the configuration has only ``LABEL_0``, ..."""
    named: dict[int, str] = getattr(config, "id2label", None) or {}
    names = tuple(str(named.get(number, f"LABEL_{number}")) for number in range(len(named)))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


def image_size(config: PreTrainedConfig, folder: Path | None, place: str) -> tuple[int, int]:
    """Return height and width of a model's images: its preprocessor's, else its configuration's.

    Raises:
        CaptureError: neither states them, or they are not sizes.
    """
    file = None if folder is None else folder / PREPROCESSOR
    stated: Any = None
    if file is not None and file.is_file():
        stated, place = _preprocessed_size(read_object(file)), str(file)
    if stated is None:
        stated = getattr(config, "image_size", None)
    sides = [stated, stated] if isinstance(stated, int) else list(stated) if isinstance(stated, list | tuple) else []
    if len(sides) != 2 or any(type(side) is not int or not 0 < side <= _LARGEST_SIDE for side in sides):
        found = "nothing" if stated is None else f"{stated!r:.80}"
        raise CaptureError(
            f"{place}: {found} says which size images have: give `crop_size`, or `size` with height and width, in "
            f"{PREPROCESSOR}, or `image_size` in config.json, as numbers up to {_LARGEST_SIDE}"
        )
    return sides[0], sides[1]


def _preprocessed_size(content: Mapping[str, Any]) -> Any:
    """Return what a preprocessor's configuration says of the images that it makes; None where it says nothing.

    Resizing to a shortest edge alone gives the image's own proportions, except for a square image: models that do
    so (ConvNeXt, ResNet) crop to a square of that size afterwards.  Loading data checks what really comes out.
    """
    crops = content.get("crop_size") if content.get("do_center_crop", True) else None
    stated = crops if crops is not None else content.get("size")
    if isinstance(stated, dict):
        edge = stated.get("shortest_edge")
        return [stated.get("height", edge), stated.get("width", edge)]
    return stated
