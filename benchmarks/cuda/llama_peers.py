"""Time a Llama in PyTorch, bfloat16: the peers of benchmarks/cuda/llama.py, called in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from llama import POSITIONS, PROMPT, PROMPTS, TOKENS, VOCABULARY, median_ms
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


def peers(sizes: tuple[int, ...], budget_s: float) -> dict[str, Any]:
    """Time the same model in PyTorch, bfloat16."""
    model = torch_llama(sizes)
    ids, position = torch.zeros(1, 1, dtype=torch.int64, device="cuda"), torch.full((1,), PROMPT, device="cuda")
    found: dict[str, Any] = {}
    began = time.perf_counter()

    def timed(name: str, make: Callable[[], Callable[[], Any]], count: int) -> None:
        if time.perf_counter() - began > budget_s:
            found[name] = "not run: out of time"
            return
        try:
            run = make()
            found[name] = median_ms(run, count, 3)
        except Exception as error:
            found[name] = f"failed: {str(error).strip()[-200:]}"

    def step(layers: Any) -> Callable[[], Any]:
        def run() -> Any:
            position.fill_(PROMPT)
            return model.step(layers, ids, position).float().cpu()

        return run

    def graphed(layers: Any) -> Callable[[], Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.step(layers, ids, position)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model.step(layers, ids, position)

        def run() -> Any:
            position.fill_(PROMPT)
            graph.replay()
            return out.float().cpu()

        return run

    def prompt(count: int) -> Callable[[], Any]:
        tokens, places = torch.zeros(1, count, dtype=torch.int64, device="cuda"), torch.arange(count, device="cuda")
        return lambda: model.step(model.layers, tokens, places).float().cpu()

    with torch.no_grad():
        for count in PROMPTS:
            timed(f"prompt_{count}_eager_ms", lambda count=count: prompt(count), 5)
        timed("decode_eager_ms", lambda: step(model.layers), 20)
        timed("decode_graph_ms", lambda: graphed(model.layers), TOKENS)
        compiled = [torch.compile(layer, fullgraph=True) for layer in model.layers]
        timed("decode_compiled_graph_ms", lambda: graphed(compiled), TOKENS)
    return found


def torch_llama(sizes: tuple[int, ...]) -> Any:
    """Return a Llama in PyTorch, bfloat16 on the GPU, with caches of POSITIONS tokens and random weights."""
    hidden, count, feed, heads, kv_heads = sizes
    width = hidden // heads

    def turned(x: Any, angles: Any) -> Any:
        a, b = x.float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = lambda n, m: nn.Linear(m, n, bias=False)  # noqa: E731
            self.qkv, self.out = linear((heads + 2 * kv_heads) * width, hidden), linear(hidden, hidden)
            self.gate_up, self.down = linear(2 * feed, hidden), linear(hidden, feed)
            self.norms = nn.Parameter(torch.ones(2, hidden))
            shape = (1, kv_heads, POSITIONS, width)
            self.register_buffer("keys", torch.zeros(shape))
            self.register_buffer("values", torch.zeros(shape))

        def forward(self, x: Any, position: Any, angles: Any, mask: Any) -> Any:
            b, s, _ = x.shape
            parts = self.qkv(rms_norm(x, (hidden,), self.norms[0])).view(b, s, heads + 2 * kv_heads, width)
            q, k, v = parts.transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
            self.keys.index_copy_(2, position, turned(k, angles))
            self.values.index_copy_(2, position, v)
            y = scaled_dot_product_attention(
                turned(q, angles), self.keys, self.values, mask, enable_gqa=heads != kv_heads
            )
            x = x + self.out(y.transpose(1, 2).reshape(b, s, hidden))
            gate, up = self.gate_up(rms_norm(x, (hidden,), self.norms[1])).chunk(2, -1)
            return x + self.down(silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(count))
            self.norm = nn.Parameter(torch.ones(hidden))
            self.head = nn.Linear(hidden, VOCABULARY, bias=False)
            exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
            self.frequencies = (10000.0**-exponents).cuda()
            self.places = torch.arange(POSITIONS).cuda()

        def step(self, layers: Any, ids: Any, position: Any) -> Any:
            angles = position[:, None].float() * self.frequencies
            mask = self.places <= position[:, None]
            x = self.table(ids)
            for layer in layers:
                x = layer(x, position, angles, mask)
            return self.head(rms_norm(x[:, -1:], (hidden,), self.norm))

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and len(parameter) > 2:
                parameter.data.normal_(0, 0.02)
    return model
