"""Tiny random encoder-decoders of many families, from transformers' own configurations, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

transformers = pytest.importorskip("transformers")

VOCAB, POSITIONS = 97, 64
_IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
_SIZES = {
    **_IDS,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": POSITIONS,
}
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "BART": ("Bart", _SIZES),
    "Marian": ("Marian", {**_SIZES, "decoder_start_token_id": 0}),
    "Pegasus": ("Pegasus", {**_SIZES, "decoder_start_token_id": 0}),
    "mBART": ("MBart", _SIZES),
    "M2M100": ("M2M100", {**_SIZES, "scale_embedding": True}),
    "Blenderbot": ("Blenderbot", _SIZES),
    "Blenderbot small": ("BlenderbotSmall", _SIZES),
    "PLBART": ("PLBart", _SIZES),
}


def make(cls: str, options: dict[str, Any]) -> Any:
    """Build a random model whose weights are large enough for masks and positions to matter."""
    config = getattr(transformers, f"{cls}Config")(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def save(folder: Path, cls: str, options: dict[str, Any]) -> Any:
    """Save a family's model in a folder with a tokenizer, and return it."""
    model = make(cls, options)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model
