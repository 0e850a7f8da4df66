"""Let PyTorch's own multi-head attention keep batch and heads apart: TVM does not follow the product of their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional


@contextmanager
def heads_apart() -> Iterator[None]:
    """Replace what ``torch.nn.MultiheadAttention`` calls, inside."""
    known = functional.multi_head_attention_forward

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        weight: Any,
        bias: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        bias_k, bias_v, add_zero, _, out_weight, out_bias, *others = rest
        masks = [more.get(name) for name in ("key_padding_mask", "attn_mask")]
        if weight is None or bias is None or others or add_zero or any(x is not None for x in (bias_k, bias_v, *masks)):
            return known(query, key, value, width, heads, weight, bias, *rest, **more)

        def split(x: Tensor, part: int) -> Tensor:
            rows = slice(part * width, (part + 1) * width)
            y = functional.linear(x.transpose(0, 1), weight[rows], bias[rows])  # [B, S, width]
            return y.reshape(*y.shape[:2], heads, width // heads).transpose(1, 2)

        q, k, v = (split(x, part) for part, x in enumerate((query, key, value)))
        scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5  # [B, heads, queries, keys]
        found = (scores.softmax(-1) @ v).transpose(1, 2)
        out = functional.linear(found.reshape(*found.shape[:2], width), out_weight, out_bias)
        return out.transpose(0, 1), None

    functional.multi_head_attention_forward = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.multi_head_attention_forward = known
