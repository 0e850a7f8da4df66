"""Choose the layout of a quantised checkpoint by its ``quant_method``, and refuse those that are not covered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compressor.capture.checkpoints.awq_words import awq_weights
from compressor.capture.checkpoints.compressed_tensors.config_groups import compressed_tensors_weights
from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored, dequantized_source
from compressor.capture.checkpoints.fp8_blocks import fp8_weights
from compressor.capture.checkpoints.gptq_words import gptq_weights
from compressor.capture.checkpoints.mlx_words import mlx_weights
from compressor.capture.checkpoints.mxfp4_experts import mxfp4_weights
from compressor.capture.weights import WeightSource, folder_source
from compressor.errors import UsageError

METHODS: dict[str, Callable[[Stored, Mapping[str, Any]], dict[str, DenseWeight]]] = {
    "awq": awq_weights,
    "compressed-tensors": compressed_tensors_weights,
    "fp8": fp8_weights,
    "gptq": gptq_weights,
    "mlx": mlx_weights,
    "mxfp4": mxfp4_weights,
}
"""``quant_method`` -> function that describes the dense weights, by name, of a checkpoint's stored tensors."""
# Scales of activations, keys and values decide no weight; shapes, unused indices and zero points of 0 have been read.
_ASIDE = re.compile(
    r"\.((input|output|q|k|v)_(global_)?(scale|zero_point)|activation_scale|weight_(shape|zero_point|g_idx))$"
)


def quantized_source(folder: Path, config: Any, weights: bool) -> WeightSource:
    """Return the dense weights that a folder's quantised tensors stand for, computed when they are read.

    Args:
        folder: with safetensors.
        config: ``quantization_config`` of its config.json.
        weights: False gives meta tensors.
    Raises:
        UsageError: the method or one of its options is not covered, or contradicts the tensors.
    """
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or not isinstance(method, str) or method not in METHODS:
        raise UsageError(
            f"{folder}/config.json: the checkpoint is quantised by {method!r:.40}, which is not read; known are "
            f"{', '.join(METHODS)}: give one of these or the unquantised checkpoint"
        )
    stored = Stored(folder_source(folder), folder_source(folder, weights=False))
    found = METHODS[method](stored, config)
    if not found:
        raise UsageError(
            f"{folder}/config.json: quantization_config says {method}, and the safetensors hold no weight of its "
            "layout; remove quantization_config if the weights are dense, or fetch the checkpoint again"
        )
    parts = {part for weight in found.values() for part in weight.parts.values()}
    dropped = frozenset(name for name in stored.names - parts if _ASIDE.search(name))
    return dequantized_source(stored, found, dropped, weights)
