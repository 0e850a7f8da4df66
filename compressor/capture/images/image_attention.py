"""Let the attention of image models be one operator; masks are made for halves that read texts alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    """Let attention layers that go through transformers' interface call our operator; others stay as written.

    Models of speech go through it without saying so.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    AttentionInterface.register(IMAGE_ATTENTION, _attend)
    MASKS.register(IMAGE_ATTENTION, _bias)
    if model._supports_attention_backend:
        model.set_attn_implementation(IMAGE_ATTENTION)
    elif model.main_input_name == "input_values" and model._supports_sdpa:
        model.config._attn_implementation = IMAGE_ATTENTION


@contextmanager
def plain_masks() -> Iterator[None]:
    """Give models that attend by their own code masks of plain operators, inside."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    before = MASKS._global_mapping["eager"]
    MASKS._global_mapping["eager"] = _bias
    try:
        yield
    finally:
        MASKS._global_mapping["eager"] = before


def _bias(
    *_: Any,
    mask_function: Any,
    attention_mask: Tensor | None,
    q_length: Any,
    kv_length: Any,
    allow_is_bidirectional_skip: bool = False,
    **__: Any,
) -> Tensor | None:
    """Return what hides keys, to be added to the scores of a text: float32 [B or 1, 1, S, S]; None where nothing does.

    Args:
        mask_function: transformers', of which query sees which key, such as those in front of it.
        attention_mask: [B, S], 1 or true for tokens and 0 or false for padding; None for pictures.
        allow_is_bidirectional_skip: without padding, every query sees every key.
    """
    if attention_mask is None and allow_is_bidirectional_skip:
        return None
    zero, queries, keys = torch.zeros((), dtype=torch.int64), torch.arange(q_length), torch.arange(kv_length)
    seen = torch.as_tensor(mask_function(zero, zero, queries[:, None], keys[None, :]))[None, None]
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None, :]
    return (~seen).float() * torch.finfo(torch.float32).min


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [B, H, S, D], key and value [B, Hkv, T, D] -> [B, S, H, D]."""
    name = type(module).__name__
    unknown = [k for k, v in others.items() if k not in _NEUTRAL and v is not None and v is not False]
    is_unmasked = bool(is_causal) and attention_mask is None  # else the mask says it
    if unknown or dropout or is_unmasked:
        wanted = ", ".join([*unknown, *(["dropout"] if dropout else []), *(["causality"] if is_unmasked else [])])
        raise CaptureError(f"{name} asks its attention for {wanted}, which no operator here implements")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if position_bias is not None:  # of frames of speech, from their distances
        attention_mask = position_bias if attention_mask is None else attention_mask + position_bias
    if query.shape == key.shape == value.shape and (attention_mask is None or attention_mask.shape[1] == 1):
        mask = query.new_ones(query.shape[0], query.shape[2])  # every patch sees every other
        bias = () if attention_mask is None else (0, attention_mask)
        return torch.ops.compressor.masked_attention(query, key, value, mask, scale, *bias), None
    scores = query @ key.transpose(-1, -2) * scale  # a bias for each head and pair of patches: plain operators
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None
