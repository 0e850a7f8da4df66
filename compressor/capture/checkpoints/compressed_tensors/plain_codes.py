"""compressed-tensors' naive layout: one int8 or float8 element for each weight.

Value: (code - zero) * scale.  An int8 code minus its zero has at most 9 bits, a float8 code 4: with scales in 16 bits
the product is exact in float32, with scales in float32 it is rounded once.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import scale_shape, spread
from compressor.capture.checkpoints.compressed_tensors.scheme import Scheme
from compressor.capture.checkpoints.dense_weights import FLOATS, DenseWeight, Stored
from compressor.capture.checkpoints.fp8_blocks import FLOAT8, scaled_values


def shifted_values(weight: Tensor, scale: Tensor, zero: Tensor, *, block: tuple[int, int]) -> Tensor:
    """Subtract zero points and multiply by scales.

    Args:
        weight: int8 [out, in].
        scale: float [ceil(out / rows), ceil(in / columns)].
        zero: int8, of the scales' shape.
        block: rows and columns that a scale serves.
    Returns:
        float32 [out, in].
    """
    shape = tuple(weight.shape)
    return (weight.float() - spread(zero, block, shape)) * spread(scale, block, shape)


def integer_tensors(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    """Store one linear of 8 bits, the inverse of :func:`shifted_values`: uint8 [out, in], scales and zeros [rows,
    groups] of its blocks; a code and a zero are stored less 128.
    """
    found = {"weight": _signed(codes), "weight_scale": scales}
    return found if zeros is None else {**found, "weight_zero_point": _signed(zeros)}


def _signed(codes: Tensor) -> Tensor:
    return (codes.to(torch.int16) - 128).to(torch.int8)


def float_tensors(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Store one linear of 8-bit floats: E4M3 codes uint8 [out, in], scales [rows, groups] of its blocks."""
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales}


def plain_weight(stored: Stored, module: str, scheme: Scheme) -> DenseWeight:
    """Return the dense weight of a module.

    Raises:
        UsageError: its tensors contradict the scheme.
    """
    name = f"{module}.weight"
    shape = stored.check_matrix(name, FLOAT8 if scheme.is_float else (torch.int8,))
    block = scheme.block(shape)
    parts = {"weight": name, "scale": f"{module}.weight_scale"}
    check_scale(stored, parts["scale"], (torch.uint8,) if scheme.format == "mxfp8-quantized" else FLOATS, shape, block)
    zero = f"{module}.weight_zero_point"
    if scheme.symmetric:
        check_no_zero(stored, zero)
        return DenseWeight(parts, shape, torch.float32, partial(scaled_values, block=block))
    check_scale(stored, zero, (torch.int8,), shape, block)
    values = partial(shifted_values, block=block)
    return DenseWeight({**parts, "zero": zero}, shape, torch.float32, values)


def check_scale(
    stored: Stored, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    """Check that scales or zero points have the shape that their blocks give; one a row or a tensor may be flat.

    Raises:
        UsageError: they have another shape or type.
    """
    given, wanted = tuple(stored.check(name, dtypes).shape), scale_shape(shape, block)
    if given != wanted and not (wanted[1] == 1 and given in ((wanted[0],), (() if wanted[0] == 1 else wanted))):
        stored.check(name, dtypes, wanted)


def check_no_zero(stored: Stored, name: str) -> None:
    """Check that a symmetric weight stores no zero point, or only zeros, as older versions did.

    Raises:
        UsageError: there are others.
    """
    if name in stored.names and bool(stored.values(name).float().any()):
        stored.refuse(name, "has values other than 0, and the weights are symmetric")
