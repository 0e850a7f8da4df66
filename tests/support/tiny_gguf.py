"""A tiny random decoder as a GGUF file with a type for each tensor, and its weights as values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_files import TYPES, block_values, random_blocks, write_gguf
from torch import Tensor

HIDDEN, VOCAB, HEADS, KV_HEADS = 256, 97, 4, 2
LAYER = {  # of one layer: name -> type, rows
    "attn_norm": ("F32", None),
    "attn_q": ("Q4_K", HIDDEN),
    "attn_k": ("Q8_0", HIDDEN // 2),
    "attn_v": ("Q6_K", HIDDEN // 2),
    "attn_output": ("Q5_K", HIDDEN),
    "ffn_norm": ("F32", None),
    "ffn_gate": ("Q2_K", HIDDEN),
    "ffn_up": ("Q3_K", HIDDEN),
    "ffn_down": ("Q4_0", HIDDEN),
}
METADATA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": HIDDEN,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HIDDEN // HEADS,
}


def tensor(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[bytes, Tensor]:
    """Return random contents of a tensor and its values, in the smallest type that holds them."""
    elements = TYPES[kind][1]
    if elements == 1:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        values = torch.from_numpy(rng.normal(1 if len(shape) == 1 else 0, 0.2, shape)).to(dtype)
        return values.view(torch.uint8).numpy().tobytes(), values
    raw = random_blocks(rng, kind, int(np.prod(shape)) // elements)
    found = np.array([block_values(kind, block.tobytes()) for block in raw]).astype(np.float32)
    return raw.tobytes(), torch.from_numpy(found.reshape(shape))


def tiny_gguf(
    path: Path, architecture: str = "llama", kinds: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Tensor]:
    """Write the file; return the values of its tensors by GGUF's names.

    Args:
        kinds: types other than those of :data:`LAYER`.
        more: tensors by name (type and shape), or metadata.
    """
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": ("F16", (VOCAB, HIDDEN)), "output_norm.weight": ("F32", (HIDDEN,))}
    for name, (kind, rows) in LAYER.items():
        kind = (kinds or {}).get(name, kind)
        shapes[f"blk.0.{name}.weight"] = (kind, (HIDDEN,) if rows is None else (rows, HIDDEN))
    metadata = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"] * VOCAB,
                "tokenizer.ggml.eos_token_id": 2}  # fmt: skip
    metadata |= {f"{architecture}.{key}": value for key, value in METADATA.items()}
    for name, given in more.items():
        if isinstance(given, tuple):
            shapes[name] = given
        elif given is None:
            metadata.pop(name, None)
            shapes.pop(name, None)
        else:
            metadata[name] = given
    made = {name: tensor(rng, *shapes[name]) for name in shapes}
    write_gguf(path, metadata, {name: (*shapes[name], content) for name, (content, _) in made.items()})
    return {name: values for name, (_, values) in made.items()}


def to_rotary_order(values: Tensor, heads: int) -> Tensor:
    """Permute as llama.cpp's convert_hf_to_gguf.py does for q_proj and k_proj."""
    rows = values.shape[0]
    halves = values.reshape(heads, 2, rows // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
