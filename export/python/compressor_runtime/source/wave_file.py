"""Read sound from a WAV file: mono, at the rate that a model was trained on."""

from __future__ import annotations

import io
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
        data = file.read_bytes() if size_bytes <= _LARGEST_BYTES else b""
    except (OSError, ValueError) as error:
        raise _not_sound(str(file), rate, str(error)) from error
    if size_bytes > _LARGEST_BYTES:
        raise RequestError(f"{file}: {size_bytes} bytes are more than the {_LARGEST_BYTES} of a WAV file; cut it")
    return wave_samples(data, str(file), rate)


def wave_samples(data: bytes, name: str, rate: int) -> NDArray[np.float32]:
    """Return the samples of a WAV file's bytes, float32 [N] from -1 to 1.

    Args:
        name: of the file, for messages.
        rate: as for :func:`read_wave`, whose errors these are.
    """
    try:
        with wave.open(io.BytesIO(data), "rb") as sound:
            channels, width, found, count = sound.getparams()[:4]
            frames = sound.readframes(count)
    except (EOFError, wave.Error, ValueError) as error:
        raise _not_sound(name, rate, str(error) or "it ends too early") from error
    if (channels, found) != (1, rate):
        raise RequestError(
            f"{name}: {channels} channel{'s' * (channels > 1)} at {found} samples a second; this model reads one "
            f"channel at {rate}: convert it first, for example with `ffmpeg -i {Path(name).name} -ac 1 -ar {rate} "
            "new.wav`"
        )
    samples = _numbers(frames[: len(frames) // width * width], width)
    if not len(samples):
        raise RequestError(f"{name}: holds no samples; give a file with sound in it")
    return samples


def _not_sound(name: str, rate: int, reason: str) -> RequestError:
    return RequestError(
        f"{name}: not a WAV file of whole numbers (PCM): {reason}; this model reads sound: give such a file, mono, at "
        f"{rate} samples a second"
    )


def _numbers(data: bytes, width: int) -> NDArray[np.float32]:
    """Return little-endian numbers of ``width`` bytes as fractions of the largest; one byte is unsigned."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, width)
    if width == 1:
        return ((raw[:, 0].astype(np.int16) - 128) / 128).astype(np.float32)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw  # in front are zeros, as if it had 32 bits
    numbers: NDArray[np.float32] = (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    return numbers
