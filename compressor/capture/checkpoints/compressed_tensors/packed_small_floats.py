"""compressed-tensors' packed FP4 layouts: two E2M1 values a byte, NVFP4 and MXFP4.

NVFP4: the value is code * scale / global_scale.  The product of 2 and 4 bits is exact in float32, and the quotient is
rounded once, to the nearest float32.  (ModelOpt stores the inverse of the global scale, which multiplies.)
MXFP4: the value is code * 2^(e - 127), exact in bfloat16.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import e8m0_scales, pack_fp4, spread, unpack_fp4
from compressor.capture.checkpoints.compressed_tensors.scheme import Scheme
from compressor.capture.checkpoints.dense_weights import DenseWeight, Stored

_GROUP_SIZES = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def nvfp4_values(packed: Tensor, scale: Tensor, global_scale: Tensor, *, group_size: int) -> Tensor:
    """Dequantise one linear.

    Args:
        packed: uint8 [out, in / 2].
        scale: float8_e4m3fn [out, in / group_size].
        global_scale: float32 [1]; divides.
        group_size: inputs that a scale serves.
    Returns:
        float32 [out, in].
    """
    values = unpack_fp4(packed)
    values *= spread(scale.float(), (1, group_size), tuple(values.shape))
    values /= global_scale.float().reshape(())
    return values


def mxfp4_linear_values(packed: Tensor, scale: Tensor, *, group_size: int) -> Tensor:
    """Dequantise one linear: uint8 [out, in / 2] and E8M0 uint8 [out, in / group_size] -> bfloat16 [out, in]."""
    values = unpack_fp4(packed)
    values *= spread(e8m0_scales(scale), (1, group_size), tuple(values.shape))
    return values.bfloat16()


def nvfp4_tensors(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> dict[str, Tensor]:
    """Store one linear: the inverse of :func:`nvfp4_values`, but for the rounding of the global scale.

    Args:
        codes: uint8 [out, in], sign and magnitude.
        scales: float8_e4m3fn [out, in / 16].
        tensor_scale: float32 [1]; multiplies, and is stored as what divides.
    """
    return {"weight_packed": pack_fp4(codes), "weight_scale": scales, "weight_global_scale": 1 / tensor_scale.float()}


def mxfp4_tensors(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Store one linear, the inverse of :func:`mxfp4_linear_values`: uint8 [out, in] and E8M0 [out, in / 32]."""
    return {"weight_packed": pack_fp4(codes), "weight_scale": scales.view(torch.uint8)}


def packed_float_weight(stored: Stored, module: str, scheme: Scheme) -> DenseWeight:
    """Return the dense weight of a module.

    Raises:
        UsageError: its tensors contradict the scheme.
    """
    packed, scale, global_scale = (f"{module}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    given = stored.check_matrix(packed, (torch.uint8,))
    size = _GROUP_SIZES[scheme.format]
    if given[1] * 2 % size or scheme.columns not in (0, size):
        stored.refuse(packed, f"has shape {list(given)} and groups of {scheme.columns}; {scheme.format} has groups of "
                              f"{size}")  # fmt: skip
    shape = (given[0], given[1] * 2)
    parts = {"packed": packed, "scale": scale}
    if scheme.format == "mxfp4-pack-quantized":
        stored.check(scale, (torch.uint8,), (shape[0], shape[1] // size))
        return DenseWeight(parts, shape, torch.bfloat16, partial(mxfp4_linear_values, group_size=size))
    stored.check(scale, (torch.float8_e4m3fn,), (shape[0], shape[1] // size))
    if stored.check(global_scale, (torch.float32,)).numel() != 1:
        stored.refuse(global_scale, "has more than one value")
    value = float(stored.values(global_scale))
    if not math.isfinite(value) or value <= 0:
        stored.refuse(global_scale, f"is {value}")
    values = partial(nvfp4_values, group_size=size)
    return DenseWeight({**parts, "global_scale": global_scale}, shape, torch.float32, values)
