"""Give a transformers model our own implementation of experts while it is captured.

experts(x, index, weights)      becomes    y = routed_linear(x, index, gate_up)                         [T, K, 2 I]
                                           y = routed_linear(silu(y[..., :I]) * y[..., I:], index, down)
                                           sum(y * weights, over K)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import compressor.ops  # noqa: F401  (registers the operators)

EXPERTS_NAME = "compressor"
_ours = torch.ops.compressor


def register_experts() -> None:
    """Make the experts' implementation ``compressor`` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_experts)


def _run_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run experts as transformers asks: hidden [T, H], index [T, K], weights [T, K] -> [T, H]."""

    def routed(x: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        if module.is_transposed:
            weight = weight.transpose(1, 2)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        out: Tensor = _ours.routed_linear(x, index, weight, bias)
        return out

    y = routed(hidden, "gate_up_proj" if module.has_gate else "up_proj")
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = routed(y, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # of newer transformers
        y = module.post_expert_norm(y)
    return (y * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
