"""Labelled images from files: what plain modules are calibrated and evaluated on."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compressor.data.text import Samples
from compressor.errors import UsageError

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource, EvaluationSpec, TextSpec


@dataclass(frozen=True)
class Images:
    """Images as they are stored, and how a model wants them.

    Attributes:
        pixels: uint8 [n, height, width, channels].
        labels: int64 [n]; None where the file has none.
        mean, std: float32 [1] or [channels]: a model reads ``(pixels / 255 - mean) / std``.
        source: where they came from.
    """

    pixels: Tensor
    labels: Tensor | None
    mean: Tensor
    std: Tensor
    source: str

    def inputs(self, which: slice = slice(None)) -> Tensor:
        """Return images as a model reads them, scaled: float32 [n, channels, height, width]."""
        scaled = (self.pixels[which].float() / 255 - self.mean) / self.std
        return scaled.permute(0, 3, 1, 2).contiguous()

    def picked(self, places: Tensor) -> Images:
        """Return the images at ``places``, int64 [m], in their order."""
        labels = None if self.labels is None else self.labels[places]
        return Images(self.pixels[places], labels, self.mean, self.std, self.source)

    @property
    def sha256(self) -> str:
        """Of pixels, labels and normalisation."""
        parts = [self.pixels, *([] if self.labels is None else [self.labels]), self.mean, self.std]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def load_images(spec: DataSource) -> Images:
    """All images of a specification's files, one file after another.

    Each is a numpy ``.npz`` with ``images`` uint8 [n, height, width, channels] and perhaps integer ``labels`` [n].

    Raises:
        UsageError: a file is not such an archive, the files do not go together, or the normalisation does not fit.
    """
    pixels, labels = zip(*(_read(path) for path in spec.find_files()), strict=True)
    label = spec.name or ", ".join(spec.files)
    if len({part.shape[1:] for part in pixels}) > 1 or len({part is None for part in labels}) > 1:
        raise UsageError(f"{label}: the files hold images of different sizes, or only some have labels")
    images = torch.cat(pixels)
    if not len(images):
        raise UsageError(f"{label}: there is no image; give a file with some")
    for key, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) not in (1, images.shape[3]):
            raise UsageError(f"{label}: {key} has {len(values)} numbers, and the images {images.shape[3]} channels")
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (spec.mean, spec.std))
    return Images(images, torch.cat(labels) if labels[0] is not None else None, mean, std, label)


def load_image_samples(spec: TextSpec) -> Samples:
    """``spec.samples`` images to calibrate on, drawn with ``spec.seed``.

    Raises:
        UsageError: as :func:`load_images`; the set is held out, or has fewer images.
    """
    images, label = load_images(spec), spec.name or ", ".join(spec.files)
    if spec.held_out:
        raise UsageError(f"calibration: {label} is held out, for evaluation only; calibrate on other images")
    if len(images.pixels) < spec.samples:
        raise UsageError(
            f"calibration: {label} has {len(images.pixels)} images, and {spec.samples} samples are wanted; set samples "
            "to fewer, or give more images"
        )
    chosen = images.picked(_drawn(spec, len(images.pixels))[0])
    return Samples(chosen.inputs(), torch.empty(0, dtype=torch.int64), chosen.sha256, label)


def load_evaluation_images(spec: EvaluationSpec, calibration: TextSpec | None) -> Images | None:
    """Labelled images to evaluate on.

    Without a source of its own, the evaluation takes those that calibration left over; None if there are none.

    Raises:
        UsageError: as :func:`load_images`; its own images have no labels.
    """
    if spec.kind is not None:
        images = load_images(spec)
        if images.labels is None:
            raise UsageError(f"evaluation: {images.source} has no `labels` to compare predictions with")
        return images
    if calibration is None:
        return None
    images = load_images(calibration)
    left = _drawn(calibration, len(images.pixels))[1]
    return images.picked(left) if images.labels is not None and len(left) else None


def _drawn(spec: TextSpec, count: int) -> tuple[Tensor, Tensor]:
    """Places of the images that are calibrated on, and of the others, int64, in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(spec.seed))
    return order[: spec.samples].sort().values, order[spec.samples :].sort().values


def _read(path: Path) -> tuple[Tensor, Tensor | None]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            images = archive["images"]
            labels = archive["labels"] if "labels" in archive.files else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: not a numpy .npz with an array `images`: {error}") from error
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UsageError(
            f"{path}: `images` is {images.dtype} {list(images.shape)}; wanted: uint8 [n, height, width, channels]"
        )
    if labels is None:
        return torch.from_numpy(images), None
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(f"{path}: `labels` is {labels.dtype} {list(labels.shape)}; wanted: an integer for each image")
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
