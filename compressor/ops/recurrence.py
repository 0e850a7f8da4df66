"""Recurrent layers: schema, eager definition and fake kernel.

Every operator takes the state that the tokens before left and returns the state that its own leave, so that a prompt,
a continued prompt and single tokens agree.  An eager definition goes through the tokens one after another: it says what
the operator means, and nothing about how a kernel gets there.  A state of zeros is that of no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.ops.register import operator

_LOWEST = -1e38
"""Largest exponent of no tokens, as RWKV's own code has it."""


@operator("causal_convolution")
def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a depthwise convolution of each token and the K - 1 before it.

    Args:
        x: float32 [B, S, C].
        weight: float32 [C, K], the token's own factor last; K is at least 2.
        bias: float32 [C] or None.
        state: float32 [B, K - 1, C], the inputs of the tokens before, the latest last.
    Returns:
        float32 [B, S, C], and the new state.
    """
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t : t + 1]], dim=1)
        y = (window * weight.t()).sum(1)
        outputs.append(y if bias is None else y + bias)
        state = window[:, 1:]
    return torch.stack(outputs, dim=1), state.clone()


@causal_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


@operator("selective_scan")
def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a selective state-space model (Gu and Dao 2023, arXiv 2312.00752; Dao and Gu 2024, arXiv 2405.21060).

    ``state = exp(dt * a) * state + dt * x * b``, then ``y = sum over N of state * c``.  Mamba is one head of all its
    channels, each with a time step and N decays of its own; Mamba 2 has one time step and one decay a head.

    Args:
        x: float32 [B, S, H, P].
        dt: float32 [B, S, H, P or 1], the time steps, positive.
        a: float32 [H, N or 1, P or 1], the decays, negative.
        b, c: float32 [B, S, G, N]; H is a multiple of the groups G, whose heads are neighbours.
        state: float32 [B, H, N, P].
    Returns:
        float32 [B, S, H, P], and the new state.
    """
    repeat, outputs = x.shape[2] // b.shape[2], []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]  # [B, H, 1, P or 1]
        write, read = (part[:, t].repeat_interleave(repeat, dim=1).unsqueeze(-1) for part in (b, c))  # [B, H, N, 1]
        state = torch.exp(step * a) * state + step * x[:, t, :, None] * write
        outputs.append((state * read).sum(2))
    return torch.stack(outputs, dim=1), state.clone()


@selective_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


@operator("gated_delta_rule")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10).

    ``state = exp(decay) * state``; ``state += k (beta * (v - k^T state))``; ``y = q^T state``.  A decay for each
    channel of the keys makes it Kimi's rule (arXiv 2510.26692).

    Args:
        q, k: float32 [B, S, Hk, Dk], normalised and scaled; H is a multiple of Hk, whose heads serve neighbours.
        v: float32 [B, S, H, Dv].
        decay: float32 [B, S, H, Dk or 1], logarithms, at most 0.
        beta: float32 [B, S, H].
        state: float32 [B, H, Dk, Dv].
    Returns:
        float32 [B, S, H, Dv], and the new state.
    """
    repeat, outputs = v.shape[2] // k.shape[2], []
    for t in range(v.shape[1]):
        query, key = (part[:, t].repeat_interleave(repeat, dim=1).unsqueeze(-1) for part in (q, k))  # [B, H, Dk, 1]
        state = state * torch.exp(decay[:, t]).unsqueeze(-1)
        change = (v[:, t] - (state * key).sum(2)) * beta[:, t].unsqueeze(-1)  # [B, H, Dv]
        state = state + key * change.unsqueeze(2)
        outputs.append((state * query).sum(2))
    return torch.stack(outputs, dim=1), state.clone()


@gated_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@operator("wkv")
def wkv(k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute RWKV-4's weighted average of values (Peng et al. 2023, arXiv 2305.13048, eq. 19 and appendix D).

    Args:
        k, v: float32 [B, S, C].
        decay: float32 [C], added to the exponents after each token, negative.
        first: float32 [C], added to a token's own exponent.
        state: float32 [B, 3, C]: numerator, denominator, and the exponent that both are divided by.
    Returns:
        float32 [B, S, C], and the new state.
    """
    top, bottom, outputs = state[:, 0], state[:, 1], []
    largest = torch.where(bottom == 0, _LOWEST, state[:, 2])  # no tokens yet: all weight is the first one's
    for t in range(k.shape[1]):
        key, value = k[:, t], v[:, t]
        now = torch.maximum(largest, key + first)
        before, own = torch.exp(largest - now), torch.exp(key + first - now)
        outputs.append((before * top + own * value) / (before * bottom + own))
        now = torch.maximum(largest + decay, key)
        before, own = torch.exp(largest + decay - now), torch.exp(key - now)
        top, bottom, largest = before * top + own * value, before * bottom + own, now
    return torch.stack(outputs, dim=1), torch.stack([top, bottom, largest], dim=1)


@wkv.register_fake
def _(k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


_OPS = torch.ops.compressor
TOKENS: Mapping[Any, tuple[str, ...]] = {
    _OPS.causal_convolution.default: ("x",),
    _OPS.selective_scan.default: ("x", "dt", "b", "c"),
    _OPS.gated_delta_rule.default: ("q", "k", "v", "decay", "beta"),
    _OPS.wkv.default: ("k", "v"),
}
"""Operators with a state, and their arguments that have a token at each place of dimension 1."""
GATES: Mapping[Any, tuple[int, ...]] = {_OPS.selective_scan.default: (1, 3, 4), _OPS.gated_delta_rule.default: (3, 4)}
"""Places of the arguments that say how fast a state decays, and what is written to it and read from it."""
