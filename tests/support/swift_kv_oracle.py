"""SwiftKV in plain PyTorch, for Llama's layers: written from the paper, and without our graphs or operators."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_llama(**sizes: Any) -> Any:
    """Return a small random model, whose layers differ and whose attention is far from uniform."""
    config = transformers.LlamaConfig(**SIZES | sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = torch.rand_like(parameter) + 0.5
            else:
                parameter.data = torch.randn_like(parameter) * (0.4 if "q_proj" in name or "k_proj" in name else 0.2)
    return model


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate [B, H, S, D] by positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@torch.no_grad()
def run(model: Any, ids: Tensor, after: int, share: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of all tokens, [B, S, V], and the residual stream in front of each layer, [B, S, C]."""
    config, layers = model.config, model.model.layers
    heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)

    x = model.model.embed_tokens(ids)
    early: Any = None
    streams = []
    for i, layer in enumerate(layers):
        if i == after:
            early = norm(x, layer.input_layernorm.weight)
        streams.append(x)
        own = norm(x, layer.input_layernorm.weight)
        if i < after:
            makers, read = [layer.self_attn], own
        else:
            first = after + (i - after) // share * share
            makers, read = [other.self_attn for other in layers[first : first + share]], early
        w_k, w_v = (torch.stack([getattr(m, name).weight for m in makers]).mean(0) for name in ("k_proj", "v_proj"))
        q = rotate(split(own @ layer.self_attn.q_proj.weight.T, heads))
        k, v = rotate(split(read @ w_k.T, kv_heads)), split(read @ w_v.T, kv_heads)
        x = x + attend(q, k, v) @ layer.self_attn.o_proj.weight.T
        inner = norm(x, layer.post_attention_layernorm.weight)
        mlp = layer.mlp
        gate = torch.nn.functional.silu(inner @ mlp.gate_proj.weight.T)
        x = x + (gate * (inner @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return norm(x, model.model.norm.weight) @ model.lm_head.weight.T, streams
