"""Tiny random models of several architectures for tests of programs, packed without calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.fx import GraphModule

from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

transformers = pytest.importorskip("transformers")

VOCAB, POSITIONS = 320, 64  # of saved models
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,  # few distinct shapes: each is a kernel to generate
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 2}, tie_word_embeddings=True),
    # 80 and 97 are multiples of neither groups nor tiles
    "qwen3": lambda: transformers.Qwen3Config(**{**GROUPED, "intermediate_size": 80}),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=3),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=64, n_inner=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=64),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=4, attn_logit_softcapping=0.5, final_logit_softcapping=3.0
    ),
}


def build(config: Any, kind: Any = None) -> nn.Module:
    """Build a random model whose weights are large enough for caps, windows and norms to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (kind or transformers.AutoModelForCausalLM).from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def quantized(
    graph: GraphModule, scheme: str, targets: str | tuple[str, ...] = "re:.*", ignore: tuple[str, ...] = ()
) -> GraphModule:
    return Rtn(scheme, targets=targets, ignore=ignore).run(graph, Context())


def relative_error(got: np.ndarray, expected: Any) -> float:
    reference = np.asarray(expected, np.float64)
    assert got.shape == reference.shape
    return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))


def save_model(folder: Path, text: str, vocab_size: int = VOCAB) -> Path:
    """Save a random Llama with a tokenizer of its own, as Hugging Face folders are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
        transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
