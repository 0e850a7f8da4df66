"""MXFP4 checkpoints (gpt-oss, ``quant_method: mxfp4``): experts' weights in blocks of 32 FP4 values.

    <name>_blocks  uint8 [experts, rows, columns / 32, 16]   two FP4 (E2M1) values a byte, the low nibble first
    <name>_scales  uint8 [experts, rows, columns / 32]       E8M0: 2^(e - 127)

The dense parameter ``<name>`` is transposed: [experts, columns, rows] (transformers,
``integrations/mxfp4.py: convert_moe_packed_tensors``).

Value: FP4 * scale.  FP4 has 2 bits of significand and bfloat16 the exponents of float32: bfloat16 holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import e8m0_scales, unpack_fp4
from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise the weights of all experts.

    Args:
        blocks: uint8 [experts, rows, columns / 32, 16].
        scales: uint8 [experts, rows, columns / 32].
    Returns:
        bfloat16 [experts, columns, rows].
    """
    values = torch.empty(len(blocks), blocks.shape[2] * 32, blocks.shape[1], dtype=torch.bfloat16)
    for expert in range(len(blocks)):  # one expert's float32 copy at a time
        factors = e8m0_scales(scales[expert])[..., None]
        values[expert] = (unpack_fp4(blocks[expert]) * factors).flatten(1).t()
    return values


def mxfp4_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of an MXFP4 checkpoint by name; the method has no options that decide values.

    Raises:
        UsageError: blocks and scales do not belong together.
    """
    weights = {}
    packed = (name.rpartition("_") for name in stored.names)
    for name in sorted({name for name, _, last in packed if last in ("blocks", "scales")}):
        blocks = f"{name}_blocks"
        shape = tuple(stored.check(blocks, (torch.uint8,)).shape)
        if len(shape) != 4 or shape[3] != 16:
            stored.refuse(blocks, f"has shape {list(shape)}, not [experts, rows, blocks, 16]")
        stored.check(f"{name}_scales", (torch.uint8,), shape[:3])
        parts = {"blocks": blocks, "scales": f"{name}_scales"}
        weights[name] = DenseWeight(parts, (shape[0], shape[2] * 32, shape[1]), torch.bfloat16, mxfp4_values)
    return weights
