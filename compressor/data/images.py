"""Labelled images: what plain modules and image classifiers are calibrated and evaluated on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compressor.data.labels import class_numbers
from compressor.data.pictures import Pictures, StoredArrays, list_folder, read_arrays
from compressor.data.preprocessing import Preprocessing, preprocessing
from compressor.data.rows import read_rows
from compressor.data.text import Samples, source_label
from compressor.errors import UsageError
from compressor.graph.model import ModelInfo

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource, EvaluationSpec, TextSpec

_ANY = ModelInfo("module", "a module", "")


@dataclass(frozen=True)
class Images:
    """Pictures as they are stored, and how a model wants them.

    Attributes:
        pictures: where they are; decoded when they are asked for.
        places: int64 [n], which of the pictures these are.
        labels: int64 [n]; None where there are none.
        prepare: makes a batch of them.
        source: where they came from.
    """

    pictures: Pictures
    places: Tensor
    labels: Tensor | None
    prepare: Preprocessing
    source: str

    def __len__(self) -> int:
        """Return their number."""
        return len(self.places)

    def inputs(self, which: slice = slice(None)) -> Tensor:
        """Return images as a model reads them: float32 [n, channels, height, width]."""
        arrays = [self.pictures.array(place) for place in self.places[which].tolist()]
        if arrays[0].dtype == np.float32:
            return torch.from_numpy(np.stack(arrays))
        return self.prepare(arrays)

    def picked(self, places: Tensor) -> Images:
        """Return the images at ``places``, int64 [m], in their order."""
        labels = None if self.labels is None else self.labels[places]
        return Images(self.pictures, self.places[places], labels, self.prepare, self.source)

    @property
    def sha256(self) -> str:
        """Digest of the stored pictures, labels and preprocessing."""
        digest = hashlib.sha256()
        self.pictures.hash_into(digest, self.places.tolist())
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        digest.update(self.prepare.facts())
        return digest.hexdigest()


def load_images(spec: DataSource, info: ModelInfo = _ANY, most: int | None = None) -> Images:
    """Find the images of a specification, decode each once to know that it can be, and number their classes.

    Args:
        spec: npz files, a folder, parquet files, or a data set of the hub.
        info: of the model, which says how images are prepared, of which shape they must then be, and how many classes
            there are.
        most: images to take at most, the first rows of a data set, spread evenly over files; None takes all.
    Raises:
        UsageError: a file is damaged, the files do not go together, a label is outside the classes, or the images do
            not have the model's size.
    """
    label = source_label(spec)
    pictures: Pictures
    pictures, labels = _stored(spec, info) if spec.kind == "images" else read_rows(spec, info, most)
    if not len(pictures):
        raise UsageError(f"{label}: there is no image; give a file with some")
    first = pictures.array(0)
    ready = first.dtype == np.float32
    channels = first.shape[0] if ready else first.shape[2]
    prepare = preprocessing(spec, info.source, channels, label, ready=ready)
    count = len(pictures) if most is None else min(most, len(pictures))
    places = torch.arange(count) * len(pictures) // count  # files lie class by class: spread over all
    images = Images(pictures, places, None if labels is None else labels[places], prepare, label)
    _check_shapes(images, info)
    _check_labels(images, info)
    return images


def load_image_samples(spec: TextSpec, info: ModelInfo = _ANY) -> Samples:
    """``spec.samples`` images to calibrate on, drawn with ``spec.seed``.

    Raises:
        UsageError: as :func:`load_images`; the set is held out, or has fewer images.
    """
    images, label = _calibration_images(spec, info), source_label(spec)
    if spec.held_out:
        raise UsageError(f"calibration: {label} is held out, for evaluation only; calibrate on other images")
    if len(images) < spec.samples:
        raise UsageError(
            f"calibration: {label} has {len(images)} images, and {spec.samples} samples are wanted; set samples "
            "to fewer, or give more images"
        )
    chosen = images.picked(drawn(spec, len(images))[0])
    return Samples(chosen.inputs(), torch.empty(0, dtype=torch.int64), chosen.sha256, label)


def load_evaluation_images(spec: EvaluationSpec, calibration: TextSpec | None, info: ModelInfo = _ANY) -> Images | None:
    """Labelled images to evaluate on.

    Without a source of its own, the evaluation takes those that calibration left over; None if there are none.

    Raises:
        UsageError: as :func:`load_images`; its own images have no labels.
    """
    if spec.kind is not None:
        images = load_images(spec, info, spec.limit)
        if images.labels is None:
            raise UsageError(f"evaluation: {images.source} has no `labels` to compare predictions with")
        return images
    if calibration is None:
        return None
    images = _calibration_images(calibration, info)
    left = drawn(calibration, len(images))[1][: spec.limit]
    return images.picked(left) if images.labels is not None and len(left) else None


def _calibration_images(spec: TextSpec, info: ModelInfo) -> Images:
    """Return all images to draw from: of rows, of which there may be millions, eight times the samples."""
    return load_images(spec, info, None if spec.kind == "images" else 8 * spec.samples)


def drawn(spec: TextSpec, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of the images or sounds that are calibrated on, and of the others, int64, in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(spec.seed))
    return order[: spec.samples].sort().values, order[spec.samples :].sort().values


def _stored(spec: DataSource, info: ModelInfo) -> tuple[Pictures, Tensor | None]:
    """Return the pictures and labels of a folder, or of .npz files, one file after another."""
    label, paths = source_label(spec), spec.find_files()
    if any(path.is_dir() for path in paths):
        if len(paths) > 1:
            raise UsageError(f"{label}: give one folder, or one or several .npz files")
        files, classes = list_folder(paths[0])
        return files, None if classes is None else class_numbers(classes, info, label)
    arrays, labels = zip(*(read_arrays(path) for path in paths), strict=True)
    same = len({(part.dtype, part.shape[1:]) for part in arrays}) == 1
    if not same or len({part is None for part in labels}) > 1:
        raise UsageError(f"{label}: the files hold images of different sizes, or only some have labels")
    return StoredArrays(np.concatenate(arrays), label), torch.cat(labels) if labels[0] is not None else None


def _check_shapes(images: Images, info: ModelInfo) -> None:
    """Decode every picture, prepare one of each size, and compare the results with what the model reads.

    Raises:
        UsageError: names the picture.
    """
    seen: set[tuple[int, ...]] = set()
    for number, place in enumerate(images.places.tolist()):
        shape = images.pictures.array(place).shape
        if shape in seen:
            continue
        seen.add(shape)
        found = tuple(images.inputs(slice(number, number + 1)).shape[1:])
        if info.image_shape and found != info.image_shape:
            made = "" if images.pictures.array(place).dtype == np.float32 else f" (stored as {_sizes(shape)})"
            raise UsageError(
                f"{images.pictures.name(place)}: gives {_sizes(found)}{made}, and {info.name} reads "
                f"{_sizes(info.image_shape)}, channels, height, width; give images of that size, or `resize` and `crop`"
            )


def _check_labels(images: Images, info: ModelInfo) -> None:
    """Raise a UsageError if a label is negative, or not below the number of classes."""
    if images.labels is None:
        return
    outside = images.labels < 0
    if info.classes:
        outside |= images.labels >= info.classes
    if outside.any():
        number = int(outside.nonzero()[0])
        place = int(images.places[number])
        limit = f"0 to {info.classes - 1}, the classes of {info.name}" if info.classes else "0 and above"
        raise UsageError(
            f"{images.pictures.name(place)}: has label {int(images.labels[number])}; labels are {limit}: correct the "
            "labels, or take the model that belongs to them"
        )


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
