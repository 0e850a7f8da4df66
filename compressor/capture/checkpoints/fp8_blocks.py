"""FP8 checkpoints (DeepSeek, Qwen; ``quant_method: fp8``): float8 weights with one scale for each block.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  float [ceil(out / rows), ceil(in / columns)]   rows, columns: ``weight_block_size``
                      float [1], [out] or [out, 1] where there is no block size; may be called ``weight_scale``

Value: weight * scale.  (``inv`` is the inverse of the factor that quantised, so it multiplies:
DeepSeek-V3, ``inference/kernel.py: weight_dequant``.)

A weight has 4 bits of significand, so a scale of up to 20 bits, such as one in bfloat16 or a power of 2, gives an
exact float32.  With a scale of 24 bits the product is rounded once, to the nearest float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import e8m0_scales, scale_shape, spread
from compressor.capture.checkpoints.dense_weights import FLOATS, DenseWeight, Stored
from compressor.capture.checkpoints.options import Options

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


def scaled_values(weight: Tensor, scale: Tensor, *, block: tuple[int, int]) -> Tensor:
    """Multiply codes by the scales of their blocks.

    Args:
        weight: float8 or int8 [out, in].
        scale: float, or E8M0 as uint8 or float8_e8m0fnu, [ceil(out / rows), ceil(in / columns)].
        block: rows and columns that a scale serves.
    Returns:
        float32 [out, in].
    """
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = e8m0_scales(scale.view(torch.uint8))
    values = weight.float()
    values *= spread(scale, block, tuple(weight.shape))
    return values


def fp8_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of an FP8 checkpoint by name.

    Raises:
        UsageError: an option is not covered, or contradicts the tensors.
    """
    options = Options("fp8", config, stored.headers.place)
    fmt = options.word("fmt", ("e4m3", "e4m3fn", "e5m2", "float8_e4m3fn"), "e4m3")
    float8 = torch.float8_e5m2 if fmt == "e5m2" else torch.float8_e4m3fn
    size = config.get("weight_block_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        options.refuse("weight_block_size", f"is {size!r:.40}; two sizes are meant")
    weights = {}
    scaled = {module for scale in _SCALE_NAMES for module in stored.modules(scale)}
    plain = {m for m in stored.modules("weight") if stored.headers.read(f"{m}.weight").dtype in FLOAT8}
    for module in sorted(scaled | plain):
        name = f"{module}.weight"
        shape = stored.check_matrix(name, (float8,))
        found = [f"{module}.{scale}" for scale in _SCALE_NAMES if f"{module}.{scale}" in stored.names]
        scale = found[0] if found else f"{module}.{_SCALE_NAMES[0]}"
        block = _block(stored, scale, size, shape)
        parts = {"weight": name, "scale": scale}
        weights[name] = DenseWeight(parts, shape, torch.float32, partial(scaled_values, block=block))
    return weights


def _block(stored: Stored, scale: str, size: list[int] | None, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns that a scale serves, once the stored scales have been checked."""
    if size is not None:
        block = size[0], size[1]
        stored.check(scale, _SCALES, scale_shape(shape, block))
        return block
    given = tuple(stored.check(scale, _SCALES).shape)
    if given in ((), (1,), (1, 1)):
        return shape[0], shape[1]
    if given not in ((shape[0],), (shape[0], 1)):
        stored.refuse(scale, f"has shape {list(given)}, and without a weight_block_size there is one for each weight "
                             "or one a row")  # fmt: skip
    return 1, shape[1]
