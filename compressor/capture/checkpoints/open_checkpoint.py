"""Open a model's folder: its configuration and its weights, however they are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.capture.checkpoints.gguf.gguf_models import find_gguf, gguf_model
from compressor.capture.checkpoints.methods import METHODS, quantized_source
from compressor.capture.files import check_config
from compressor.capture.weights import WeightSource, folder_source
from compressor.errors import CaptureError, UsageError, first_line
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Newer and older name of one key, and MLX's.
_MLX_KEY = "quantization"
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", _MLX_KEY)
# Files that state the quantisation in its place -> method.
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration, without quantisation, and its weights as dense values."""

    config: PreTrainedConfig
    file: Path  # that states the configuration
    config_sha256: str
    source: WeightSource


@dataclass(frozen=True)
class DenseFolder:
    """A folder as the dense one that it stands for: content of config.json without quantisation, and weights."""

    config: Mapping[str, Any]
    source: WeightSource


def _quantization(stated: Mapping[str, Any]) -> Any:
    """Return how a config.json says that weights are quantised; MLX has a key and no method."""
    if isinstance(of_mlx := stated.get(_MLX_KEY), dict):
        return {**of_mlx, "quant_method": "mlx"}
    return next((stated[key] for key in _QUANTIZATION_KEYS if stated.get(key)), None)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has a configuration beside safetensors, or a GGUF file."""
    return (folder / "config.json").is_file() or find_gguf(folder) is not None


def dense_folder(folder: Path, weights: bool) -> DenseFolder:
    """Read what the dense model of a folder would have in its config.json, and its weights, however they are stored.

    Args:
        weights: False reads headers only; weights are on the meta device.
    Raises:
        CaptureError: the configuration or a file cannot be used.
        UsageError: the way in which weights are quantised is not covered, or contradicts them.
    """
    gguf = find_gguf(folder)
    if gguf is not None:
        return DenseFolder(*gguf_model(gguf, weights))
    file = folder / "config.json"
    if not file.is_file():
        raise CaptureError(f"{folder}: no config.json; give a folder as Hugging Face's save_pretrained writes it")
    stated = read_object(file)
    quantization = _quantization(stated)
    # Before anything slow.
    source = folder_source(folder, weights) if quantization is None else quantized_source(folder, quantization, weights)
    if quantization is None:
        _refuse_unstated(folder, source)
    return DenseFolder({key: value for key, value in stated.items() if key not in _QUANTIZATION_KEYS}, source)


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

    file, source = folder / "config.json", dense_folder(folder, weights).source
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


def _refuse_unstated(folder: Path, source: WeightSource) -> None:
    """Refuse quantised tensors that config.json does not speak of, as tools wrote them before 2024."""
    packed = sorted(name for name in source.names if name.endswith(_PACKED))
    if not packed:
        return
    beside = next((name for name in SIDE_FILES if (folder / name).is_file()), None)
    advice = "give the unquantised checkpoint"
    if beside is not None and SIDE_FILES[beside] in METHODS:
        advice = f'copy the keys of {beside} there, and add "quant_method": "{SIDE_FILES[beside]}"'
    raise UsageError(
        f"{source.files.get(packed[0], folder)}: {packed[0]} is quantised, and config.json has no quantization_config; "
        f"{advice}"
    )


def _open_gguf(file: Path, weights: bool) -> Checkpoint:
    from transformers import AutoConfig

    stated, source = gguf_model(file, weights)
    config = AutoConfig.for_model(**stated)
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return Checkpoint(config, file, digest, source)
