"""Sounds that tests make: tones that glide, as WAV files in a folder with a table of texts."""

from __future__ import annotations

import csv
import wave
from pathlib import Path

import numpy as np

RATE = 16_000


def tone(samples: int, seed: int = 0) -> np.ndarray:
    """Return float32 [samples]: a gliding tone with a little noise."""
    rng, time = np.random.default_rng(seed), np.arange(samples) / RATE
    glide = np.sin(2 * np.pi * (220 + 60 * seed) * time * (1 + 2 * time))
    return (0.4 * glide + 0.02 * rng.normal(size=samples)).astype(np.float32)


def write_wave(file: Path, samples: np.ndarray, rate: int = RATE, channels: int = 1) -> Path:
    """Write samples in 16 bits."""
    with wave.open(str(file), "wb") as stream:
        stream.setparams((channels, 2, rate, 0, "NONE", ""))
        stream.writeframes(np.round(samples.astype(np.float64) * 32767).astype("<i2").tobytes())
    return file


def write_sounds(folder: Path, texts: list[str], samples: int = 3200, column: str = "text") -> Path:
    """Write a folder of sounds, each a little longer than the one before, with ``metadata.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", column])
        for number, text in enumerate(texts):
            write_wave(folder / f"{number}.wav", tone(samples + 160 * number, number))
            table.writerow([f"{number}.wav", text])
    return folder
