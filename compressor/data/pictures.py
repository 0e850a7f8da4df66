"""Read pictures from where they are stored: arrays of an .npz, files of a folder, rows of a data set.

Pictures are decoded when they are asked for; encoded rows lie in a temporary file meanwhile.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.errors import CompressorError, UsageError

SUFFIXES = (".png", ".jpg", ".jpeg")
_MOST_PIXELS = 1 << 26  # a picture of a few bytes can ask for gigabytes
_PLAIN_MODES = ("RGB", "L", "1", "P")  # what becomes RGB without a choice


class Pictures(Protocol):
    """A number of pictures, each decoded when it is asked for."""

    def __len__(self) -> int:
        """Return their number."""

    def name(self, place: int) -> str:
        """Return what messages call one of them."""

    def array(self, place: int) -> NDArray[Any]:
        """Return one, uint8 [height, width, channels], or as a model reads it, float32 [channels, height, width].

        Raises:
            UsageError: it is damaged, or of a kind that has no plain form; its name is in the message.
        """

    def hash_into(self, digest: Any, places: Sequence[int]) -> None:
        """Feed the stored bytes of some to a ``hashlib`` object."""


@dataclass(frozen=True)
class StoredArrays:
    """Pictures of .npz files: uint8 [n, height, width, channels], or ready, float32 [n, channels, height, width]."""

    arrays: NDArray[Any]
    source: str

    def __len__(self) -> int:
        """Return their number."""
        return len(self.arrays)

    def name(self, place: int) -> str:
        """Return the source and the place, from 0."""
        return f"{self.source}[{place}]"

    def array(self, place: int) -> NDArray[Any]:
        """Return one of them."""
        found: NDArray[Any] = self.arrays[place]
        return found

    def hash_into(self, digest: Any, places: Sequence[int]) -> None:
        """Feed the numbers of some to a ``hashlib`` object."""
        for place in places:
            digest.update(np.ascontiguousarray(self.arrays[place]).tobytes())


class Encoded(ABC):
    """Pictures or sounds that are kept as the bytes of files."""

    @abstractmethod
    def __len__(self) -> int:
        """Return their number."""

    @abstractmethod
    def name(self, place: int) -> str:
        """Return what a message calls one."""

    @abstractmethod
    def encoded(self, place: int) -> bytes:
        """Read one, encoded.

        Raises:
            UsageError: its file cannot be read.
        """

    def array(self, place: int) -> NDArray[Any]:
        """Read a picture and decode it."""
        return decode(self.encoded(place), self.name(place))

    def hash_into(self, digest: Any, places: Sequence[int]) -> None:
        """Feed the bytes of some to a ``hashlib`` object."""
        for place in places:
            digest.update(self.encoded(place))


@dataclass(frozen=True)
class EncodedFiles(Encoded):
    """Pictures or sounds that are files."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        """Return their number."""
        return len(self.files)

    def name(self, place: int) -> str:
        """Return the file."""
        return str(self.files[place])

    def encoded(self, place: int) -> bytes:
        """Read a file."""
        try:
            return self.files[place].read_bytes()
        except OSError as error:
            raise UsageError(f"{self.files[place]}: cannot be read ({error.strerror}); check the file") from error


@dataclass
class EncodedRows(Encoded):
    """Pictures or sounds of a data set's rows, kept encoded in one temporary file without a name."""

    source: str
    ends: list[int] = field(default_factory=lambda: [0])
    file: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def append(self, encoded: bytes) -> None:
        """Add one."""
        self.file.seek(self.ends[-1])
        self.file.write(encoded)
        self.ends.append(self.ends[-1] + len(encoded))

    def __len__(self) -> int:
        """Return their number."""
        return len(self.ends) - 1

    def name(self, place: int) -> str:
        """Return the source and the row, from 0."""
        return f"{self.source}, row {place}"

    def encoded(self, place: int) -> bytes:
        """Read one back."""
        self.file.seek(self.ends[place])
        return self.file.read(self.ends[place + 1] - self.ends[place])


def decode(encoded: bytes, name: str) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG to RGB, uint8 [height, width, 3], upright as its EXIF data says.

    Raises:
        UsageError: it is neither, damaged, larger than 2^26 pixels, or of a mode that becomes RGB by choice only
            (transparency, CMYK, 16 bits).
    """
    image_module = require_pillow()
    from PIL import ImageOps

    try:
        with image_module.open(io.BytesIO(encoded), formats=("PNG", "JPEG")) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise UsageError(f"{name}: {image.width}x{image.height} are more than {_MOST_PIXELS} pixels; shrink it")
            if image.mode not in _PLAIN_MODES or "transparency" in image.info:
                mode = f"{image.mode} with transparency" if "transparency" in image.info else image.mode
                raise UsageError(f"{name}: its mode is {mode}; save it as RGB or greyscale of 8 bits")
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except CompressorError:
        raise
    except Exception as error:  # Pillow raises many types for damaged files
        raise UsageError(f"{name}: a damaged picture, or neither PNG nor JPEG ({error!s:.120}); replace it") from error


def require_pillow() -> Any:
    """Import Pillow's module ``Image``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("reading pictures needs Pillow: pip install 'compressor[images]'") from error
    return Image


def read_arrays(path: Path) -> tuple[NDArray[Any], Tensor | None]:
    """Read ``images`` and, if there, ``labels`` int64 [n] of a numpy ``.npz``.

    Images are uint8 [n, height, width, channels], or float32 [n, channels, height, width] as a model reads them.

    Raises:
        UsageError: it is not such an archive.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            images = archive["images"]
            labels = archive["labels"] if "labels" in archive.files else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: not a numpy .npz with an array `images`: {error}") from error
    ready = images.dtype == np.float32 and images.ndim == 4 and images.shape[1] <= images.shape[3]
    if not ready and (images.dtype != np.uint8 or images.ndim != 4):
        raise UsageError(
            f"{path}: `images` is {images.dtype} {list(images.shape)}; wanted: uint8 [n, height, width, channels], or "
            "float32 [n, channels, height, width] as the model reads it"
        )
    if ready and not np.isfinite(images).all():
        raise UsageError(f"{path}: `images` holds NaN or infinite numbers; correct the file")
    if labels is None:
        return images, None
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(f"{path}: `labels` is {labels.dtype} {list(labels.shape)}; wanted: an integer for each image")
    return images, torch.from_numpy(labels.astype(np.int64))


def list_folder(folder: Path) -> tuple[EncodedFiles, list[str] | None]:
    """List the pictures of a folder, and for each the folder that it is in, its class; None where there are no classes.

    Hidden files and folders are left out.

    Raises:
        UsageError: there is none, something else is among them, or only some are in a class.
    """
    found = sorted(_visible(folder))
    strange = [path for path in found if path.suffix.lower() not in SUFFIXES]
    if strange:
        raise UsageError(
            f"{strange[0]}: not a picture ({', '.join(SUFFIXES)}); remove it from the folder, or convert it"
        )
    if not found:
        raise UsageError(f"{folder}: there is no image in this folder; give one with PNG or JPEG files")
    depths = {len(path.relative_to(folder).parts) for path in found}
    if depths == {1}:
        return EncodedFiles(tuple(found)), None
    if depths != {2}:
        raise UsageError(f"{folder}: pictures lie at different depths; give each class one folder with its pictures")
    return EncodedFiles(tuple(found)), [path.parent.name for path in found]


def _visible(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.name.startswith("."):
            if path.is_dir():
                yield from _visible(path)
            else:
                yield path
