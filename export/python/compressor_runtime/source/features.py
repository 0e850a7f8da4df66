"""Compute of sound what an encoder reads, as the model's processor in transformers does, to about 1e-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError

_HIGHEST_HZ, _LEAST_POWER = 8000.0, 1e-10


def source_of(samples: NDArray[np.float32], facts: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return an encoder's source float32 [1, ...] for one sound.

    Args:
        samples: float32 [N], from -1 to 1.
        facts: the manifest's entry about the source.
    Raises:
        RequestError: the sound is too short or too long.
    """
    settings, rate = facts["features"], facts["features"]["sampling_rate"]
    if settings["method"] == "log_mel":
        longest = int(settings["chunk_length"] * rate)
        if len(samples) > longest:
            raise RequestError(
                f"the sound lasts {len(samples) / rate:.1f} s, and this model hears {longest / rate:g} s at most; cut "
                "it into shorter pieces"
            )
        return log_mel(np.pad(samples, (0, longest - len(samples))), settings)[None]
    if len(samples) < facts["min_positions"]:
        raise RequestError(f"the sound has {len(samples)} samples; this model needs {facts['min_positions']} or more")
    if settings["normalize"]:
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + np.float32(1e-7))
    return samples[None].astype(np.float32)


def log_mel(samples: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return Whisper's logarithmic mel spectrogram (Radford et al. 2022, arXiv 2212.04356), float32 [bins, frames].

    A frame has ``n_fft`` samples around each ``hop_length``-th one, under a periodic Hann window; the ends are
    reflected.  What lies more than 8 decades below the loudest is raised to that; the rest becomes (x + 4) / 4.
    """
    length, hop = settings["n_fft"], settings["hop_length"]
    padded = np.pad(samples.astype(np.float64), length // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, length)[::hop][:-1]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    power = np.abs(np.fft.rfft(frames * window)) ** 2  # [frames, length // 2 + 1]
    filters = mel_filters(settings["feature_size"], length // 2 + 1, settings["sampling_rate"])
    decades = np.log10(np.maximum(power @ filters, _LEAST_POWER)).T
    spectrogram: NDArray[np.float32] = ((np.maximum(decades, decades.max() - 8) + 4) / 4).astype(np.float32)
    return spectrogram


def mel_filters(bins: int, frequencies: int, rate: int) -> NDArray[np.float64]:
    """Return triangular filters float64 [frequencies, bins] from 0 to 8 kHz, evenly spaced on Slaney's mel scale, each
    of the same area.

    Args:
        frequencies: of a spectrum, from 0 to half the rate.
    """
    step = np.log(6.4) / 27  # above 1 kHz, 27 mels a factor of 6.4; below, 3 mels each 200 Hz
    top = 15 + np.log(_HIGHEST_HZ / 1000) / step
    mels = np.linspace(0, top, bins + 2)
    hertz = np.where(mels < 15, 200 * mels / 3, 1000 * np.exp(step * (mels - 15)))
    distances = hertz[None] - np.linspace(0, rate // 2, frequencies)[:, None]
    rising, falling = -distances[:, :-2] / np.diff(hertz)[:-1], distances[:, 2:] / np.diff(hertz)[1:]
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * 2 / (hertz[2:] - hertz[:-2])
    return filters
