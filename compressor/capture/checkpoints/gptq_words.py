"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes packed along the input, zero points along the output.

For a linear of ``in`` inputs and ``out`` outputs (AutoGPTQ, ``qlinear_cuda.py: QuantLinear.pack``):

    qweight  int32 [in * bits / 32, out]      32-bit words down a column, lowest bits first, no gap between codes
    qzeros   int32 [groups, out * bits / 32]  words along a row
    scales   float [groups, out]
    g_idx    int32 [in]                       group of each input; absent: input // group_size

Value: (code - zero) * scale.  ``checkpoint_format: gptq`` (v1) stores zero - 1 modulo 2^bits, ``gptq_v2`` the zero
itself.  Codes of 3 bits are 32 in 3 words.

Code minus zero has at most 9 bits and a scale in 16 bits at most 11 of significand: the product has at most 20, and
float32 holds it exactly.  (Loaders that multiply in float16 round it.)
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

_BITS = (2, 3, 4, 8)


def gptq_values(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, group_size: int, offset: int
) -> Tensor:
    """Dequantise one linear.

    Args:
        qweight: int32 [in * bits / 32, out].
        qzeros: int32 [groups, out * bits / 32].
        scales: float16, bfloat16 or float32 [groups, out].
        g_idx: int32 [in], or None.
        bits: of a code.
        group_size: inputs of a group, where ``g_idx`` is None.
        offset: what is added to a stored zero point: 1 for v1, 0 for v2.
    Returns:
        float32 [out, in].
    """
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    codes = unpack_words(qweight.t(), bits, inputs)
    zeros = (unpack_words(qzeros, bits, outputs) + offset) & (2**bits - 1)  # [groups, out]
    group = torch.arange(inputs) // group_size if g_idx is None else g_idx.long()
    values = codes.float()
    values -= zeros.t().float()[:, group]
    values *= scales.t().float()[:, group]
    return values


def gptq_tensors(codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, offset: int) -> dict[str, Tensor]:
    """Store one linear: the inverse of :func:`gptq_values`.

    Args:
        codes: uint8 [out, in]; both a multiple of 32.
        scales: float16 [out, groups].
        zeros: uint8 [out, groups].
        bits: of a code.
        offset: what is subtracted from a zero point: 1 for v1, 0 for v2.
    """
    group_size = -(-codes.shape[1] // scales.shape[1])
    stored_zeros = (zeros - offset) & (2**bits - 1)
    return {
        "qweight": pack_words(codes, bits).t().contiguous(),
        "qzeros": pack_words(stored_zeros.t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // group_size).to(torch.int32),
    }


def gptq_weights(stored: Stored, config: Mapping[str, Any]) -> dict[str, DenseWeight]:
    """Return the dense weights of a GPTQ checkpoint by name.

    Raises:
        UsageError: an option is not covered, or contradicts the tensors.
    """
    options = Options("gptq", config, stored.headers.place)
    bits = options.number("bits", _BITS)
    group_size = options.number("group_size")
    named = next((key for key in ("checkpoint_format", "format") if options.given(key)), "checkpoint_format")
    offset = {"gptq": 1, "gptq_v2": 0}[options.word(named, ("gptq", "gptq_v2"), "gptq")]
    options.word("pack_dtype", ("int32",), "int32")
    for key, why in (("dynamic", "gives modules options of their own"), ("is_marlin_format", "is true")):
        if options.given(key):
            options.refuse(key, why)
    weights = {}
    for module in sorted({*stored.modules("qweight"), *stored.modules("qzeros")}):
        weight = _linear(stored, module, bits, group_size, offset, bool(config.get("desc_act")))
        weights[f"{module}.weight"] = weight
    return weights


def _linear(stored: Stored, module: str, bits: int, group_size: int, offset: int, ordered: bool) -> DenseWeight:
    parts = {name: f"{module}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")}
    words, outputs = stored.check_matrix(parts["qweight"], (torch.int32,))
    inputs = words * 32 // bits
    if words * 32 % bits or outputs * bits % 32:
        stored.refuse(parts["qweight"], f"has shape [{words}, {outputs}], which no {bits}-bit codes fill")
    size = min(group_size, inputs) if group_size > 0 else inputs
    groups = -(-inputs // size)
    stored.check(parts["scales"], FLOATS, (groups, outputs))
    stored.check(parts["qzeros"], (torch.int32,), (groups, outputs * bits // 32))
    if parts["g_idx"] not in stored.names or not stored.headers.read(parts["g_idx"]).numel():
        parts.pop("g_idx")
        if ordered and group_size > 0:
            stored.refuse(f"{module}.g_idx", "is missing, and desc_act orders the inputs by it")
        values = partial(gptq_values, g_idx=None, bits=bits, group_size=size, offset=offset)
    else:
        check_groups(stored, parts["g_idx"], inputs, groups, None if ordered else size)
        values = partial(gptq_values, bits=bits, group_size=size, offset=offset)
    return DenseWeight(parts, (outputs, inputs), torch.float32, values)


def check_groups(stored: Stored, name: str, inputs: int, groups: int, size: int | None) -> None:
    """Check an index of groups, int32 [inputs]: values below ``groups``; with ``size``, input // size.

    Raises:
        UsageError: it is anything else.
    """
    stored.check(name, (torch.int32, torch.int64), (inputs,))
    index = stored.values(name)
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        stored.refuse(name, f"has groups {low} to {high}, and there are {groups}")
    if size is not None and not torch.equal(index.long(), torch.arange(inputs) // size):
        stored.refuse(name, f"orders its inputs, and desc_act is false with groups of {size}")
