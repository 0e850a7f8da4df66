"""Let the attention of image models be one operator, with nothing masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.errors import CaptureError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE_ATTENTION = "compressor_images"
_NEUTRAL = frozenset({"position_ids", "use_cache", "return_dict", "output_attentions", "output_hidden_states"})


def use_image_attention(model: PreTrainedModel) -> None:
    """Let attention layers that go through transformers' interface call our operator; others stay as written."""
    from transformers import AttentionInterface

    if model._supports_attention_backend:
        AttentionInterface.register(IMAGE_ATTENTION, _attend)
        model.set_attn_implementation(IMAGE_ATTENTION)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [B, H, S, D], key and value [B, Hkv, T, D] -> [B, S, H, D]."""
    name = type(module).__name__
    unknown = [k for k, v in others.items() if k not in _NEUTRAL and v is not None and v is not False]
    if unknown or dropout or is_causal:
        wanted = ", ".join([*unknown, *(["dropout"] if dropout else []), *(["causality"] if is_causal else [])])
        raise CaptureError(f"{name} asks its attention for {wanted}, which no operator here implements")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if attention_mask is None and query.shape == key.shape == value.shape:
        mask = query.new_ones(query.shape[0], query.shape[2])  # every patch sees every other
        return torch.ops.compressor.masked_attention(query, key, value, mask, scale), None
    scores = query @ key.transpose(-1, -2) * scale  # a bias for each pair of patches: plain operators
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None
