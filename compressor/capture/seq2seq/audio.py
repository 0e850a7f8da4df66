"""Read how a model of speech takes sound: which features of it, and with which tokens its decoder begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.errors import CaptureError
from compressor.graph.model import PREPROCESSOR
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from compressor.capture.meta_model import MetaModel

_RATE = 16_000  # samples a second
_LOG_MEL = {"feature_size": 80, "n_fft": 400, "hop_length": 160, "chunk_length": 30, "sampling_rate": _RATE}
"""Whisper's features, with their defaults."""


@dataclass(frozen=True)
class AudioSource:
    """Fields of :class:`compressor.graph.model.SourceInfo`."""

    shape: tuple[int, ...]
    max_positions: int
    features: Mapping[str, Any]


def audio_source(meta_model: MetaModel, argument: str) -> AudioSource:
    """Return what a model of speech reads, by its configuration and its processor's file, where there is one.

    Args:
        argument: of the model, for sound: ``input_values`` are samples, ``input_features`` a spectrogram.
    Raises:
        CaptureError: features that the run-time does not compute.
    """
    config, given = meta_model.model.config, _processor(meta_model)
    kind = given.get("feature_extractor_type", "")
    if argument == "input_values":
        normalize = bool(given.get("do_normalize", False))
        features = {"method": "samples", "normalize": normalize, "sampling_rate": given.get("sampling_rate", _RATE)}
        return AudioSource((0,), 0, features)
    bins, frames = getattr(config, "num_mel_bins", 0), 2 * getattr(config, "max_source_positions", 0)
    features = {"method": "log_mel", **{key: given.get(key, default) for key, default in _LOG_MEL.items()}}
    features["feature_size"] = given.get("feature_size", bins)
    seconds = frames * features["hop_length"] / features["sampling_rate"]
    if "WhisperFeatureExtractor" not in (kind or "WhisperFeatureExtractor") or config.model_type != "whisper":
        raise CaptureError(
            f"{meta_model.name}: {kind or config.model_type} computes features that no run-time here does; models of "
            "speech are served that read samples, or Whisper's logarithmic mel spectrogram"
        )
    if features["feature_size"] != bins or given.get("dither") or not frames:
        raise CaptureError(f"{meta_model.name}: {PREPROCESSOR} does not give the {bins} bins that config.json asks for")
    features["chunk_length"] = given.get("chunk_length", seconds)
    return AudioSource((bins, frames), frames, features)


def _processor(meta_model: MetaModel) -> dict[str, Any]:
    file = None if meta_model.folder is None else meta_model.folder / PREPROCESSOR
    return read_object(file) if file is not None and file.is_file() else {}


def whisper_start(start: int | None, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a Whisper decoder's first tokens: start, language, task, and that no timestamps are wanted.

    As transformers' generation puts them, but that the language is not detected: it is English unless
    generation_config.json states one.
    """
    assert start is not None
    forced = [token for _, token in given.get("forced_decoder_ids") or [] if token is not None]
    languages, tasks = given.get("lang_to_id") or {}, given.get("task_to_id") or {}
    named = given.get("language") or "en"
    language = languages.get(named, languages.get(f"<|{named}|>"))
    found = [start, *([] if language is None else [language])]
    if language is not None and tasks:
        found.append(tasks[given.get("task") or "transcribe"])
    if language is None:
        found += forced
    last = given.get("no_timestamps_token_id")
    if last is not None and not given.get("return_timestamps") and found[-1] != last:
        found.append(last)
    return tuple(found)
