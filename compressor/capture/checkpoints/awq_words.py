"""AWQ checkpoints (AutoAWQ, ``version: gemm``): codes and zero points packed along the output, interleaved.

For a linear of ``in`` inputs and ``out`` outputs (AutoAWQ, ``awq/modules/linear/gemm.py: WQLinear_GEMM.from_linear``):

    qweight  int32 [in, out / 8]          nibble p of a word (bits 4p to 4p + 3) is output 0, 2, 4, 6, 1, 3, 5, 7 of 8
    qzeros   int32 [in / group, out / 8]  the same order
    scales   float [in / group, out]

Value: (code - zero) * scale.  Both differ by less than 16, so the product has at most 5 + 11 bits: exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import pack_words, unpack_words
from compressor.capture.checkpoints.dense_weights import FLOATS, DenseWeight, Stored
from compressor.capture.checkpoints.options import Options

_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Nibble of each of a word's eight outputs: the inverse of the order in which they are packed."""


def awq_values(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int) -> Tensor:
    """Dequantise one linear.

    Args:
        qweight: int32 [in, out / 8].
        qzeros: int32 [groups, out / 8].
        scales: float16, bfloat16 or float32 [groups, out].
        group_size: inputs of a group.
    Returns:
        float32 [out, in].
    """
    group = torch.arange(len(qweight)) // group_size
    values = _unpack(qweight).t().float()
    values -= _unpack(qzeros).t().float()[:, group]
    values *= scales.t().float()[:, group]
    return values


def _unpack(words: Tensor) -> Tensor:
    outputs = words.shape[-1] * 8
    nibbles = unpack_words(words, 4, outputs).reshape(len(words), -1, 8)
    return nibbles[..., _NIBBLES].flatten(-2)


def awq_tensors(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """Store one linear: the inverse of :func:`awq_values`.

    Args:
        codes: uint8 [out, in] of 4 bits, ``out`` a multiple of 8.
        scales: float16 [out, groups].
        zeros: uint8 [out, groups].
    """
    return {"qweight": _pack(codes.t()), "qzeros": _pack(zeros.t()), "scales": scales.t().contiguous()}


def _pack(rows: Tensor) -> Tensor:
    order = sorted(range(8), key=_NIBBLES.__getitem__)
    return pack_words(rows.reshape(len(rows), -1, 8)[..., order].flatten(-2), 4)


def awq_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of an AWQ checkpoint by name.

    Raises:
        UsageError: an option is not covered, or contradicts the tensors.
    """
    options = Options("awq", config, stored.headers.place)
    options.word("version", ("gemm",), "gemm")
    options.number("bits", (4,), config.get("w_bit"))
    group_size = options.number("group_size", default=config.get("q_group_size"))
    if config.get("zero_point") is False:
        options.refuse("zero_point", "is false; only asymmetric codes are covered")
    weights = {}
    for module in sorted({*stored.modules("qweight"), *stored.modules("qzeros")}):
        parts = {name: f"{module}.{name}" for name in ("qweight", "qzeros", "scales")}
        inputs, words = stored.check_matrix(parts["qweight"], (torch.int32,))
        size = min(group_size, inputs) if group_size > 0 else inputs
        groups = -(-inputs // size)
        stored.check(parts["qzeros"], (torch.int32,), (groups, words))
        stored.check(parts["scales"], FLOATS, (groups, words * 8))
        values = partial(awq_values, group_size=size)
        weights[f"{module}.weight"] = DenseWeight(parts, (words * 8, inputs), torch.float32, values)
    return weights
