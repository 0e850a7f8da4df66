"""Read sound from a WAV file: mono, at the rate that a model was trained on."""

from __future__ import annotations

import os
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError

_LARGEST_BYTES = 1 << 31


def read_wave(path: str | os.PathLike[str], rate: int) -> NDArray[np.float32]:
    """Return samples float32 [N] from -1 to 1.

    Args:
        path: a WAV file of whole numbers (PCM) of 8, 16, 24 or 32 bits.
        rate: samples a second that are wanted.
    Raises:
        RequestError: it is not such a file, has several channels or another rate, or holds no samples.
    """
    file = Path(path)
    try:
        size_bytes = file.stat().st_size
        with wave.open(str(file), "rb") as sound:
            channels, width, found, count = sound.getparams()[:4]
            data = sound.readframes(count) if size_bytes <= _LARGEST_BYTES else b""
    except (OSError, EOFError, wave.Error, ValueError) as error:
        reason = str(error) or "it ends too early"
        raise RequestError(
            f"{file}: not a WAV file of whole numbers (PCM): {reason}; this model reads sound: "
            f"give such a file, mono, at {rate} samples a second"
        ) from error
    if (channels, found) != (1, rate):
        raise RequestError(
            f"{file}: {channels} channel{'s' * (channels > 1)} at {found} samples a second; this model reads one "
            f"channel at {rate}: convert it first, for example with `ffmpeg -i {file.name} -ac 1 -ar {rate} new.wav`"
        )
    samples = _numbers(data[: len(data) // width * width], width)
    if not len(samples):
        raise RequestError(f"{file}: holds no samples, or {size_bytes} bytes, which are too many; give a shorter one")
    return samples


def _numbers(data: bytes, width: int) -> NDArray[np.float32]:
    """Return little-endian numbers of ``width`` bytes as fractions of the largest; one byte is unsigned."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, width)
    if width == 1:
        return ((raw[:, 0].astype(np.int16) - 128) / 128).astype(np.float32)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw  # in front are zeros, as if it had 32 bits
    numbers: NDArray[np.float32] = (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    return numbers
