"""Tiny random models that give frames of sounds tokens (CTC), from transformers' own configurations, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_feat_extract_layers": 3,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
_CONFORMER = {**_SIZES, "conv_depthwise_kernel_size": 7}
CTC: dict[str, tuple[str, dict[str, Any]]] = {
    "Wav2Vec2": ("Wav2Vec2", _SIZES),
    "Wav2Vec2, large": ("Wav2Vec2", {**_SIZES, **_LARGE}),
    "HuBERT": ("Hubert", _SIZES),
    "Data2Vec audio": ("Data2VecAudio", {**_SIZES, "conv_pos_kernel_size": 7, "num_conv_pos_embeddings": 3}),
    "WavLM": ("WavLM", _SIZES),
    "UniSpeech": ("UniSpeech", _SIZES),
    "UniSpeech-SAT": ("UniSpeechSat", _SIZES),
    "SEW": ("SEW", {**_SIZES, "squeeze_factor": 2}),
    "Wav2Vec2-Conformer": ("Wav2Vec2Conformer", {**_CONFORMER, "position_embeddings_type": "relative"}),
    "Wav2Vec2-Conformer, rotary": ("Wav2Vec2Conformer", {**_CONFORMER, "position_embeddings_type": "rotary"}),
}


def save(folder: Path, cls: str, options: dict[str, Any], **processor: Any) -> Any:
    """Save a family's model with its feature extractor and tokenizer, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{cls}ForCTC")(getattr(transformers, f"{cls}Config")(**options)).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        model.lm_head.weight.data *= 5  # else all frames have one token
    model.requires_grad_(False).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(**{"do_normalize": True, **processor}).save_pretrained(folder)
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", "'", *(chr(65 + i) for i in range(26))]
    vocab = folder / "tokens" / "vocab.json"
    vocab.parent.mkdir()
    vocab.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    transformers.Wav2Vec2CTCTokenizer(str(vocab)).save_pretrained(folder)
    vocab.unlink()
    vocab.parent.rmdir()
    return model
