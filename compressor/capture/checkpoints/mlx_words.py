"""MLX checkpoints (mlx-lm, ``quantization`` in config.json): codes along the input, an affine grid for each group.

For a linear of ``in`` inputs and ``out`` outputs, or a table of ``out`` rows (mlx, ``mlx/ops.cpp: affine_quantize``):

    weight  uint32 [out, in * bits / 32]   codes one after another, lowest bits first, without gaps
    scales  float [out, in / group]
    biases  float [out, in / group]

Value: code * scale + bias.  The product of 8 bits and a float16 is exact in float32; the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import pack_words, spread, unpack_words
from compressor.capture.checkpoints.dense_weights import FLOATS, DenseWeight, Stored
from compressor.capture.checkpoints.options import Options

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def mlx_values(weight: Tensor, scales: Tensor, biases: Tensor, *, bits: int, group_size: int) -> Tensor:
    """Dequantise one linear or table.

    Args:
        weight: uint32 [out, words].
        scales, biases: float16, bfloat16 or float32 [out, groups].
    Returns:
        float32 [out, in].
    """
    shape = len(weight), scales.shape[1] * group_size
    values = unpack_words(weight.view(torch.int32), bits, shape[1]).float()
    values *= spread(scales, (1, group_size), shape)
    values += spread(biases, (1, group_size), shape)
    return values


def mlx_tensors(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> dict[str, Tensor]:
    """Store codes, uint8 [out, in], of the value (code - zero) * scale: the inverse of :func:`mlx_values`.

    Scales and biases are float16 if all biases are, otherwise float32: the product of a zero point of 8 bits and a
    float16 is exact there.

    Args:
        scales: float16 [out, groups].
        zeros: uint8 [out, groups].
    """
    biases = -(zeros.float() * scales.float())
    dtype = torch.float16 if torch.equal(biases.half().float(), biases) else torch.float32
    words = pack_words(codes, bits).view(torch.uint32)
    return {"weight": words, "scales": scales.to(dtype).contiguous(), "biases": biases.to(dtype).contiguous()}


def mlx_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of an MLX checkpoint by name; a module may have bits and a group size of its own.

    Raises:
        UsageError: an option is not covered, or contradicts the tensors.
    """
    weights = {}
    for module in stored.modules("scales"):
        own = config.get(module)
        options = Options("mlx", own if isinstance(own, dict) else config, stored.headers.place)
        options.word("mode", ("affine",), "affine")
        bits, size = options.number("bits", BITS, 4), options.number("group_size", GROUP_SIZES, 64)
        parts = {name: f"{module}.{name}" for name in ("weight", "scales", "biases")}
        rows, words = stored.check_matrix(parts["weight"], (torch.uint32,))
        _, groups = stored.check_matrix(parts["scales"], FLOATS)
        if groups * size * bits != words * 32:
            stored.refuse(parts["scales"], f"has {groups} groups of {size} weights, and {words} words of {bits} bits")
        for name in ("scales", "biases"):
            stored.check(parts[name], FLOATS, (rows, groups))
        values = partial(mlx_values, bits=bits, group_size=size)
        weights[parts["weight"]] = DenseWeight(parts, (rows, groups * size), torch.float32, values)
    return weights
