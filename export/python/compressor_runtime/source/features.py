"""Compute of sound what an encoder reads, as the model's processor in transformers does, to about 1e-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError

_HIGHEST_HZ, _LEAST_POWER = 8000.0, 1e-10
_FRAME, _HOP, _SPECTRUM = 400, 160, 512  # samples of Kaldi's frames, at 16 kHz
_LOWEST_HZ, _PREEMPHASIS, _EPSILON, _LEAST_SPREAD = 20.0, 0.97, 2.0**-23, 1e-5


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
    if settings["method"] == "filter_banks":
        frames, limit = filter_banks(samples, settings), facts["max_positions"] or len(samples)
        if not facts["min_positions"] <= len(frames) <= limit:
            raise RequestError(
                f"the sound lasts {len(samples) / rate:.2f} s, {len(frames)} frames; this model reads "
                f"{facts['min_positions']} to {limit} frames of {_HOP / rate:g} s: give another one, or cut it"
            )
        return frames[None]
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


def filter_banks(samples: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return Kaldi's logarithms of mel filter banks, float32 [frames, bins], with mean 0 and variance 1 if asked.

    A frame has 400 samples, all inside of the sound.  Its mean is taken off, then 0.97 times the sample before; the
    window is Povey's, a Hann window to the power 0.85.
    """
    bins, rate = settings["num_mel_bins"], settings["sampling_rate"]
    if len(samples) < _FRAME:
        return np.zeros((0, bins), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64) * 2**15, _FRAME)[::_HOP]
    frames = frames - frames.mean(1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / (_FRAME - 1))) ** 0.85
    power = np.abs(np.fft.rfft((frames - _PREEMPHASIS * before) * window, _SPECTRUM)) ** 2
    energies = np.log(np.maximum(power @ kaldi_filters(bins, rate), _EPSILON))
    if settings["normalize_means"]:
        energies -= energies.mean(0)
    if settings["normalize_vars"]:
        energies /= np.maximum(energies.std(0), _LEAST_SPREAD)  # of silence, where all frames are alike
    result: NDArray[np.float32] = energies.astype(np.float32)
    return result


def kaldi_filters(bins: int, rate: int) -> NDArray[np.float64]:
    """Return filters float64 [257, bins] that are triangles on Kaldi's mel scale, from 20 Hz to half the rate."""

    def mel(hertz: Any) -> Any:
        return 1127 * np.log(1 + hertz / 700)

    corners = np.linspace(mel(_LOWEST_HZ), mel(rate // 2), bins + 2)
    distances = corners[None] - mel(np.arange(_SPECTRUM // 2 + 1) * rate / _SPECTRUM)[:, None]
    rising, falling = -distances[:, :-2] / np.diff(corners)[:-1], distances[:, 2:] / np.diff(corners)[1:]
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    return filters


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
