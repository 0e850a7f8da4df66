"""One module's stored tensors as a checkpoint: what a layout makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored
from compressor.capture.weights import WeightSource


def stored(tensors: Mapping[str, Tensor], module: str = "layer") -> Stored:
    named = {f"{module}.{name}" if module else name: tensor for name, tensor in tensors.items()}
    return Stored(
        WeightSource("here", frozenset(named), named.__getitem__),
        WeightSource("here", frozenset(named), lambda name: named[name].to("meta")),
    )


def dense_weight(
    layout: Callable[[Stored, Mapping[str, Any]], dict[str, DenseWeight]],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    name: str = "layer.weight",
) -> Tensor:
    """Return the values of one weight, which must be of the type and shape that were foretold."""
    source = stored(tensors)
    weight = layout(source, config)[name]
    values = weight.dequantize(**{part: source.values(key) for part, key in weight.parts.items()})
    assert values.dtype == weight.dtype and tuple(values.shape) == weight.shape
    return values
