"""Tiny random models of pictures with texts, as Hugging Face folders hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import SIDE
from tiny_images import save as save_with_preprocessor
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn

transformers = pytest.importorskip("transformers")

WORDS = ("<pad>", "<end>", "?", "a", "photo", "of", "an", "old", "cat", "dog", "bird", "house", ".")
VOCAB, POSITIONS, END = 40, 16, 39
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
FAMILIES: dict[str, Any] = {
    "CLIP": lambda: transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16),
    "SigLIP": lambda: transformers.SiglipConfig(text_config={**TEXT, "projection_size": 32}, vision_config=VISION),
    "AltCLIP": lambda: transformers.AltCLIPConfig(
        text_config={**TEXT, "project_dim": 32}, vision_config=VISION, projection_dim=16
    ),
    "Chinese CLIP": lambda: transformers.ChineseCLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16),
    "CLIPSeg": lambda: transformers.CLIPSegConfig(text_config=TEXT, vision_config=VISION, projection_dim=16),
    "MetaCLIP 2": lambda: transformers.MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=16),
}


def pair(family: str) -> nn.Module:
    """Build a random model whose weights are large enough for every layer to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModel.from_config(FAMILIES[family]()).eval()
        for name, parameter in model.named_parameters():
            if not name.startswith("logit"):
                parameter.data += 0.05 * torch.randn(parameter.shape)
        if hasattr(model, "logit_bias"):  # as after training
            model.logit_scale.data.fill_(1.5)
            model.logit_bias.data.fill_(-3.0)
    return model.requires_grad_(False)


def save(model: nn.Module, folder: Path, masks: bool = True) -> Path:
    """Save a model with its preprocessor and a tokenizer of few words.

    Args:
        masks: the tokenizer gives masks; else texts are filled up to the model's positions.
    """
    save_with_preprocessor(model, folder)
    words = {word: i for i, word in enumerate(WORDS)} | {"<eos>": END}
    words |= {f"w{i}": i for i in range(len(WORDS), END)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<end> $A <eos>", special_tokens=[("<end>", 1), ("<eos>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", "attention_mask"] if masks else ["input_ids"]
    pads = {"pad_token": "<pad>", "added_tokens_decoder": {"0": {"content": "<pad>"}}, "model_input_names": inputs}
    (folder / "tokenizer_config.json").write_text(json.dumps(pads), encoding="utf-8")
    return folder
