"""Turn stored pictures into what a model reads: by its own preprocessor, or by keys of the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.pictures import require_pillow
from compressor.errors import UsageError, first_line
from compressor.graph.model import PREPROCESSOR
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource

_KEYS = ("mean", "std", "resize", "crop")


class Preprocessing(Protocol):
    """Turn pictures of any sizes into a batch."""

    def __call__(self, arrays: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return float32 [n, channels, height, width] for pictures uint8 [height, width, channels]."""

    def facts(self) -> bytes:
        """Return everything that decides the result, for digests."""


@dataclass(frozen=True)
class Scaled:
    """Pictures as they are, as ``(pixels / 255 - mean) / std``; mean and std float32 [1] or [channels]."""

    mean: Tensor
    std: Tensor

    def __call__(self, arrays: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return float32 [n, channels, height, width] for pictures of one size."""
        pixels = torch.from_numpy(np.stack(arrays)).float() / 255
        return ((pixels - self.mean) / self.std).permute(0, 3, 1, 2).contiguous()

    def facts(self) -> bytes:
        """Return mean and std."""
        return self.mean.numpy().tobytes() + self.std.numpy().tobytes()


@dataclass(frozen=True)
class Processed:
    """Pictures as an image processor of transformers makes them, the one that computes with Pillow and numpy."""

    processor: Any

    def __call__(self, arrays: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return float32 [n, channels, height, width] for pictures of any sizes.

        Raises:
            UsageError: the processor fails.
        """
        image_module = require_pillow()
        pictures = [image_module.fromarray(array.squeeze(2) if array.shape[2] == 1 else array) for array in arrays]
        try:
            made = [self.processor(images=picture, return_tensors="np")["pixel_values"][0] for picture in pictures]
        except Exception as error:  # code of transformers, on a configuration that may hold anything
            raise UsageError(
                f"{PREPROCESSOR}: fails on a picture of the data ({first_line(error)}); fetch it again"
            ) from error
        return torch.stack([torch.from_numpy(np.ascontiguousarray(one, np.float32)) for one in made])

    def facts(self) -> bytes:
        """Return the processor's class and settings."""
        settings = {key: value for key, value in self.processor.to_dict().items() if not key.startswith("_")}
        return json.dumps([type(self.processor).__name__, settings], sort_keys=True, default=str).encode()


def preprocessing(
    spec: DataSource, folder: Path | None, channels: int, label: str, ready: bool = False
) -> Preprocessing:
    """Return the preprocessing: by the recipe's keys where it has any, else the model's own, else pixels / 255.

    Args:
        spec: with ``mean``, ``std``, ``resize`` and ``crop``.
        folder: of the model; None for a plain module.
        channels: of the pictures.
        label: of the data, for messages.
        ready: the pictures are float32 as the model reads them: there is nothing to do.
    Raises:
        UsageError: a model folder has no usable preprocessor and the recipe no keys; numbers and channels do not fit.
    """
    given = [key for key in _KEYS if getattr(spec, key) is not None]
    if ready and given:
        raise UsageError(f"{label}: holds float32 images, which the model reads as they are; remove {', '.join(given)}")
    if folder is not None and not given and not ready:
        return _folder_processor(folder)
    mean, std = spec.mean or (0.0,), spec.std or (1.0,)
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise UsageError(f"{label}: {key} has {len(values)} numbers, and the images {channels} channels")
    if spec.resize is None and spec.crop is None:
        return Scaled(*(torch.tensor(values, dtype=torch.float32) for values in (mean, std)))
    require_pillow()
    from transformers import CLIPImageProcessorPil

    mean, std = (values * channels if len(values) == 1 else values for values in (mean, std))
    return Processed(
        CLIPImageProcessorPil(
            do_resize=spec.resize is not None,
            size={"shortest_edge": spec.resize or 1},
            do_center_crop=spec.crop is not None,
            crop_size=spec.crop or 1,
            image_mean=list(mean),
            image_std=list(std),
        )
    )


def _folder_processor(folder: Path) -> Processed:
    file = folder / PREPROCESSOR
    if not file.is_file():
        raise UsageError(
            f"{folder}: no {PREPROCESSOR}; put the model's beside its weights, or give the data `mean` and `std` (and "
            "`resize` and `crop`)"
        )
    read_object(file)  # says what is wrong with it
    require_pillow()
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    try:
        processor = load(str(folder), backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"{file}: not a preprocessor that transformers can build without other code ({first_line(error)}); give "
            "the data `mean` and `std` (and `resize` and `crop`) in its place"
        ) from error
    return Processed(processor)
