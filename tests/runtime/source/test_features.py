"""Sound files and features: what the run-time computes is what transformers' processors compute."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_runtime import RequestError
from compressor_runtime.source.features import filter_banks, log_mel, mel_filters, source_of
from compressor_runtime.source.wave_file import read_wave

RATE = 16_000
SETTINGS = {"method": "log_mel", "feature_size": 80, "n_fft": 400, "hop_length": 160, "chunk_length": 2}
FACTS: dict[str, Any] = {"features": {**SETTINGS, "sampling_rate": RATE}, "min_positions": 1}


def sound(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    time = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 440 * time * (1 + time)) + 0.01 * rng.normal(size=time.size)).astype(np.float32)


def write(file: Path, samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = RATE) -> Path:
    largest = 2 ** (8 * width - 1)
    numbers = np.round(samples.astype(np.float64) * (largest - 1)).astype(np.int64) + (128 if width == 1 else 0)
    raw = numbers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    with wave.open(str(file), "wb") as stream:
        stream.setparams((channels, width, rate, 0, "NONE", ""))
        stream.writeframes(raw.tobytes())
    return file


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_log_mel_is_whispers(seconds: float) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    expected = extractor(sound(seconds), sampling_rate=RATE, return_tensors="np").input_features
    got = source_of(sound(seconds), FACTS)
    assert got.shape == expected.shape == (1, 80, 200) and got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4
    np.testing.assert_allclose(mel_filters(80, 201, RATE), extractor.mel_filters, atol=1e-12)


def test_samples_are_wav2vec2s() -> None:
    transformers = pytest.importorskip("transformers")
    for normalize in (False, True):
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize)
        expected = extractor(sound(0.1), sampling_rate=RATE, return_tensors="np").input_values
        facts = {"features": {"method": "samples", "normalize": normalize, "sampling_rate": RATE}, "min_positions": 1}
        np.testing.assert_allclose(source_of(sound(0.1), facts), expected, atol=1e-5)


@pytest.mark.parametrize("seconds", [0.05, 0.7])
def test_filter_banks_are_kaldis(seconds: float) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"method": "filter_banks", "sampling_rate": RATE, "num_mel_bins": 80}
    for means, variances in ((True, True), (False, False)):
        extractor = transformers.Speech2TextFeatureExtractor(normalize_means=means, normalize_vars=variances)
        expected = extractor(sound(seconds), sampling_rate=RATE, return_tensors="np").input_features
        facts = {"features": {**settings, "normalize_means": means, "normalize_vars": variances}}
        got = source_of(sound(seconds), {**facts, "min_positions": 1, "max_positions": 100})
        assert got.shape == expected.shape == (1, 1 + int(seconds * 100 - 2.5), 80)
        assert np.abs(got - expected).max() < 1e-4
    for wrong in (0.02, 2.0):
        with pytest.raises(RequestError, match=r"this model reads 1 to 100 frames of 0.01 s"):
            source_of(sound(wrong), {**facts, "min_positions": 1, "max_positions": 100})


def test_silence_has_no_infinities() -> None:
    assert np.isfinite(log_mel(np.zeros(2 * RATE, np.float32), FACTS["features"])).all()
    banks = {"sampling_rate": RATE, "num_mel_bins": 80, "normalize_means": True, "normalize_vars": True}
    assert np.abs(filter_banks(np.zeros(RATE, np.float32), banks)).max() < 1e-6


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width_are_read(width: int, tmp_path: Path) -> None:
    samples = sound(0.05)
    got = read_wave(write(tmp_path / "a.wav", samples, width), RATE)
    assert got.dtype == np.float32 and np.abs(got - samples).max() < 1.5 / 2 ** (8 * width - 1) + 1e-6


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "empty.wav").write_bytes(b"")
    stereo, slow = write(tmp_path / "s.wav", sound(0.1), channels=2), write(tmp_path / "r.wav", sound(0.1), rate=8000)
    for file, reason in {
        tmp_path / "text.wav": "not a WAV file",
        tmp_path / "empty.wav": "it ends too early",
        tmp_path / "none.wav": "No such file",
        stereo: "2 channels at 16000",
        slow: "1 channel at 8000 samples a second; this model reads one channel at 16000",
        write(tmp_path / "nothing.wav", sound(0)): "holds no samples",
    }.items():
        with pytest.raises(RequestError, match=reason):
            read_wave(file, RATE)


def test_length_is_checked() -> None:
    with pytest.raises(RequestError, match=r"lasts 3.0 s, and this model hears 2 s"):
        source_of(sound(3), FACTS)
    facts = {"features": {"method": "samples", "normalize": False, "sampling_rate": RATE}, "min_positions": 1279}
    with pytest.raises(RequestError, match="needs 1279 or more"):
        source_of(sound(0.01), facts)
