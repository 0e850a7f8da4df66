"""compressed-tensors' pack-quantized layout: integer codes in 32-bit words along the input, lowest bits first.

A stored code is the signed code + 2^(bits - 1); stored zero points likewise, so the difference of the two is that of
the signed ones.  Words are dense since version 0.17; before it, a word held 32 // bits codes of 3, 5, 6 or 7 bits.
The two are told apart by the number of words.

Value: (code - zero) * scale, at most 9 bits by those of the scale: exact in float32 with scales in 16 bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compressor.capture.checkpoints.bit_fields import pack_words, scale_shape, spread, unpack_words, word_count
from compressor.capture.checkpoints.compressed_tensors.plain_codes import check_no_zero, check_scale
from compressor.capture.checkpoints.compressed_tensors.scheme import Scheme
from compressor.capture.checkpoints.dense_weights import FLOATS, DenseWeight, Stored
from compressor.capture.checkpoints.gptq_words import check_groups


def packed_values(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    shape: tuple[int, int],
    block: tuple[int, int],
    dense: bool,
) -> Tensor:
    """Dequantise one linear.

    Args:
        packed: int32 [out, words].
        scale: float [out or 1, groups].
        zero: int32 [words of out, groups], packed along the output, or int8 of the scales' shape, or None.
        g_idx: int32 [in], the group of each input, or None where groups follow each other.
        bits: of a code.
        shape: out, in.
        block: rows and columns that a scale serves.
        dense: codes leave no gap in a word.
    Returns:
        float32 [out, in].
    """
    values = unpack_words(packed, bits, shape[1], dense).float()
    if zero is None:
        values -= 2 ** (bits - 1)
    elif zero.dtype == torch.int32:
        zeros = unpack_words(zero.t(), bits, scale_shape(shape, block)[0], dense).t()
        values -= _place(zeros, block, shape, g_idx)
    else:
        values -= _place(zero.float() + 2 ** (bits - 1), block, shape, g_idx)
    return values.mul_(_place(scale, block, shape, g_idx))


def packed_tensors(codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int) -> dict[str, Tensor]:
    """Store one linear: the inverse of :func:`packed_values`.

    Args:
        codes: uint8 [out, in].
        scales: float [out, groups].
        zeros: uint8 [out, groups]; None where it is 2^(bits - 1) everywhere.
        bits: of a code.
    """
    found = {"weight_packed": pack_words(codes, bits), "weight_scale": scales}
    found["weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
    if zeros is not None:
        found["weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
    return found


def _place(scales: Tensor, block: tuple[int, int], shape: tuple[int, int], g_idx: Tensor | None) -> Tensor:
    return spread(scales, block, shape) if g_idx is None else scales.float()[:, g_idx.long()]


def packed_weight(stored: Stored, module: str, scheme: Scheme) -> DenseWeight:
    """Return the dense weight of a module.

    Raises:
        UsageError: its tensors contradict the scheme.
    """
    packed, scale, zero, g_idx, stated = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
    )
    given = stored.check_matrix(packed, (torch.int32,))
    stored.check(stated, (torch.int64, torch.int32), (2,))
    shape = (int(stored.values(stated)[0]), int(stored.values(stated)[1]))
    if given[0] != shape[0] or shape[1] < 1:
        stored.refuse(packed, f"has shape {list(given)}, and {stated} says {list(shape)}")
    dense = _is_dense(stored, packed, given[1], shape[1], scheme.bits)
    block = scheme.block(shape)
    check_scale(stored, scale, FLOATS, shape, block)
    parts = {"packed": packed, "scale": scale}
    rows, groups = scale_shape(shape, block)
    if scheme.symmetric:
        check_no_zero(stored, zero)
    else:
        parts["zero"] = zero
        if stored.check(zero, (torch.int32, torch.int8)).dtype == torch.int32:
            stored.check(zero, (torch.int32,), (word_count(rows, scheme.bits, dense), groups))
        else:
            check_scale(stored, zero, (torch.int8,), shape, block)
    if g_idx in stored.names and not bool((stored.values(g_idx) == -1).all()):  # -1: not in use
        if scheme.strategy != "group":
            stored.refuse(g_idx, f"orders inputs by groups, and the strategy is {scheme.strategy}")
        check_groups(stored, g_idx, shape[1], groups, None)
        parts["g_idx"] = g_idx
    values = partial(packed_values, bits=scheme.bits, shape=shape, block=block, dense=dense)
    return DenseWeight(parts, shape, torch.float32, values)


def _is_dense(stored: Stored, packed: str, words: int, inputs: int, bits: int) -> bool:
    """Tell by the number of words whether codes leave gaps in them; refuse a number that fits neither, or both."""
    wanted, gapped = word_count(inputs, bits), word_count(inputs, bits, dense=False)
    if words not in (wanted, gapped):
        stored.refuse(packed, f"has {words} words a row, and {inputs} codes of {bits} bits take {wanted}")
    if wanted == gapped and wanted > 1 and 32 % bits:
        stored.refuse(packed, f"may be packed with or without gaps: both take {words} words a row")
    return words == wanted
