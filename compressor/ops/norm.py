"""RMS norm: schema, eager definition and fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.ops.register import operator


@operator("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: float32 [..., D].
        weight: float32 [D].
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
