"""Open a model's folder: its configuration and its weights, however they are stored."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.capture.checkpoints.gguf.gguf_models import find_gguf, gguf_model
from compressor.capture.checkpoints.methods import quantized_source
from compressor.capture.files import check_config
from compressor.capture.weights import WeightSource, folder_source
from compressor.errors import CaptureError, first_line
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Newer and older name of one key.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration, without quantisation, and its weights as dense values."""

    config: PreTrainedConfig
    file: Path  # that states the configuration
    config_sha256: str
    source: WeightSource


def open_checkpoint(folder: Path, trust_remote_code: bool, weights: bool) -> Checkpoint:
    """Open a Hugging Face folder, or one with a GGUF file.

    Args:
        weights: False reads headers only; weights are on the meta device.
    Raises:
        CaptureError: the configuration or a file cannot be used.
        UsageError: the way in which weights are quantised is not covered, or contradicts them.
    """
    gguf = find_gguf(folder)
    if gguf is not None:
        return _open_gguf(gguf, weights)
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise CaptureError(f"{folder}: no config.json; give a folder as Hugging Face's save_pretrained writes it")
    stated = read_object(file)
    quantization = next((stated[key] for key in _QUANTIZATION_KEYS if stated.get(key)), None)
    # Before anything slow.
    source = folder_source(folder, weights) if quantization is None else quantized_source(folder, quantization, weights)
    check_config(file, len(source.names))
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        hint = "" if trust_remote_code else "; if the model brings its own code, ask for it with trust_remote_code"
        raise CaptureError(f"{file}: cannot be used ({first_line(error)}){hint}") from error
    for key in _QUANTIZATION_KEYS:
        if getattr(config, key, None) is not None:
            delattr(config, key)  # weights are dense now, and transformers would ask for the method's package
    return Checkpoint(config, file, hashlib.sha256(file.read_bytes()).hexdigest(), source)


def _open_gguf(file: Path, weights: bool) -> Checkpoint:
    from transformers import AutoConfig

    stated, source = gguf_model(file, weights)
    config = AutoConfig.for_model(**stated)
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return Checkpoint(config, file, digest, source)
