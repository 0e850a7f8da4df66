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
_FILTER_BANKS = {"sampling_rate": _RATE, "num_mel_bins": 80, "normalize_means": True, "normalize_vars": True}
"""Speech2Text's features, likewise."""


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
    if config.model_type == "speech_to_text":
        return _filter_banks(meta_model, given)
    bins, frames = getattr(config, "num_mel_bins", 0), 2 * getattr(config, "max_source_positions", 0)
    features = {"method": "log_mel", **{key: given.get(key, default) for key, default in _LOG_MEL.items()}}
    features["feature_size"] = given.get("feature_size", bins)
    seconds = frames * features["hop_length"] / features["sampling_rate"]
    if "WhisperFeatureExtractor" not in (kind or "WhisperFeatureExtractor") or config.model_type != "whisper":
        raise CaptureError(
            f"{meta_model.name}: {kind or config.model_type} computes features that no run-time here does; models of "
            "speech are served that read samples, Whisper's logarithmic mel spectrogram, or Kaldi's filter banks"
        )
    if features["feature_size"] != bins or given.get("dither") or not frames:
        raise CaptureError(f"{meta_model.name}: {PREPROCESSOR} does not give the {bins} bins that config.json asks for")
    features["chunk_length"] = given.get("chunk_length", seconds)
    return AudioSource((bins, frames), frames, features)


def _filter_banks(meta_model: MetaModel, given: Mapping[str, Any]) -> AudioSource:
    """Return what Speech2Text reads: frames of Kaldi's filter banks, as many as the sound has."""
    config = meta_model.model.config
    features = {"method": "filter_banks", **{key: given.get(key, default) for key, default in _FILTER_BANKS.items()}}
    if not given.get("do_ceptral_normalize", True):  # transformers' spelling
        features |= {"normalize_means": False, "normalize_vars": False}
    asked = config.input_feat_per_channel * config.input_channels
    if features["num_mel_bins"] != asked or config.input_channels != 1 or given.get("dither"):
        raise CaptureError(
            f"{meta_model.name}: {PREPROCESSOR} does not give the {asked} bins that config.json asks for"
        )
    return AudioSource((0, asked), config.max_source_positions, features)


def _processor(meta_model: MetaModel) -> dict[str, Any]:
    file = None if meta_model.folder is None else meta_model.folder / PREPROCESSOR
    return read_object(file) if file is not None and file.is_file() else {}


def whisper_start(start: int | None, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a Whisper decoder's first tokens: start, language, task, and that no timestamps are wanted.

    As transformers' generation puts them where it is told the language: it is not detected, but English unless
    generation_config.json states one.  A model without languages begins with its forced tokens.

    Raises:
        CaptureError: the language is none of the model's.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    assert start is not None
    languages, tasks = given.get("lang_to_id") or {}, given.get("task_to_id") or {}
    found = [start]
    if languages:
        named = str(given.get("language") or "en").lower()
        code = named if named in languages else f"<|{TO_LANGUAGE_CODE.get(named, named)}|>"
        if code not in languages:
            raise CaptureError(
                f"generation_config.json: the language is {named!r:.40}, and lang_to_id has "
                f"{', '.join(languages)!s:.200}; state one of these as `language`"
            )
        found += [languages[code], *([tasks[given.get("task") or "transcribe"]] if tasks else [])]
    else:
        found += [token for _, token in given.get("forced_decoder_ids") or [] if token is not None]
    last = given.get("no_timestamps_token_id")
    if last is not None and found[-1] != last:
        found.append(last)
    return tuple(found)
