"""Attention, and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compressor.capture.onnx_in.operators.table import operator
from compressor.capture.onnx_in.stored import DTYPES
from compressor.capture.onnx_in.values import Call, refuse


def _heads(x: Tensor, count: int) -> Tensor:
    """Split [batch, sequence, heads * width] into [batch, heads, sequence, width]."""
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


@operator("Attention")
def attention(call: Call) -> Tensor | tuple[Tensor, ...]:
    """Attend: ``softmax(softcap(q k^T * scale) + mask) v``; rows that see nothing are 0."""
    q, k, v = (call.tensor(i) for i in range(3))
    flat = q.dim() == 3
    if flat:
        q_heads, kv_heads = call.get("q_num_heads"), call.get("kv_num_heads")
        if not q_heads or not kv_heads:
            raise refuse("its inputs have three dimensions, and it states no number of heads")
        q, k, v = _heads(q, q_heads), _heads(k, kv_heads), _heads(v, kv_heads)
    past = 0
    if call.has(4) != call.has(5):
        raise refuse("it takes past keys or past values without the other")
    if call.has(4):
        past = call.tensor(4).shape[2]
        k, v = torch.cat([call.tensor(4), k], 2), torch.cat([call.tensor(5), v], 2)
    present, dtype = (k, v), q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    scale = call.get("scale", 1.0 / math.sqrt(q.shape[3]))
    root = math.sqrt(scale) if scale >= 0 else 0.0
    if scale < 0:
        raise refuse(f"its scale is {scale}")
    raw = torch.matmul(q * root, (k * root).transpose(-1, -2))
    cap = call.get("softcap", 0.0)
    capped = torch.tanh(raw / cap) * cap if cap else raw
    masked = _masked(call, capped, past)
    wide = masked if call.get("softmax_precision") is None else masked.to(DTYPES[call.get("softmax_precision")])
    seen = torch.amax(wide, -1, True) > -math.inf
    weights = torch.softmax(wide, -1)
    if masked is not capped:
        weights = torch.where(seen, weights, torch.zeros_like(weights))
    y = torch.matmul(weights.to(v.dtype), v).to(dtype)
    y = y.transpose(1, 2).flatten(2) if flat else y
    scores = (raw, capped, masked, weights)[call.get("qk_matmul_output_mode", 0)].to(dtype)
    return (y, *present, scores)[: call.outputs] if call.outputs > 1 else y


def _masked(call: Call, scores: Tensor, past: int | torch.SymInt) -> Tensor:
    """Add the mask, and minus infinity behind each query."""
    queries, keys = scores.shape[-2:]
    result = scores
    if call.has(3):
        mask = call.tensor(3)
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(scores.dtype)
        if isinstance(mask.shape[-1], int) and isinstance(keys, int) and mask.shape[-1] < keys:
            mask = torch.nn.functional.pad(mask, [0, keys - mask.shape[-1]], value=-math.inf)
        result = result + mask
    if call.get("is_causal", 0):
        allowed: Any = torch.arange(keys) <= torch.arange(queries).unsqueeze(1) + past
        result = torch.where(allowed, result, torch.full_like(result, -math.inf))
    return result


@operator("RotaryEmbedding")
def rotary_embedding(call: Call) -> Tensor:
    """Rotate pairs of channels by angles of their positions."""
    x, cos, sin = (call.tensor(i) for i in range(3))
    flat = x.dim() == 3
    if flat:
        heads = call.get("num_heads", 0)
        if not heads:
            raise refuse("its input has three dimensions, and it states no number of heads")
        x = _heads(x, heads)
    width = call.get("rotary_embedding_dim", 0) or x.shape[3]
    if call.has(3):
        positions = call.tensor(3)
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., :width], x[..., width:]
    if call.get("interleaved", 0):
        first, second = turned[..., 0::2], turned[..., 1::2]
        pair = torch.stack([cos * first - sin * second, sin * first + cos * second], -1).flatten(-2)
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
        pair = torch.cat([cos * first - sin * second, sin * first + cos * second], -1)
    y = torch.cat([pair, rest], -1) if isinstance(rest.shape[-1], int) and rest.shape[-1] else pair
    return y.transpose(1, 2).flatten(2) if flat else y
