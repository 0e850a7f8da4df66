"""Tiny random encoder-decoders of many families, from transformers' own configurations, saved as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from web_bundles import web_tensors

from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.graph.caches import empty_caches

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
_T5_SIZES = {
    **_IDS,
    "decoder_start_token_id": 0,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
}
_GEMMA_SIZES = {
    **{key: value for key, value in _IDS.items() if key != "decoder_start_token_id"},
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
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
    "T5": ("T5", _T5_SIZES),
    "FLAN-T5": ("T5", {**_T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mT5": ("MT5", {**_T5_SIZES, "tie_word_embeddings": False}),
    "T5Gemma": ("T5Gemma", {**_IDS, "encoder": _GEMMA_SIZES, "decoder": _GEMMA_SIZES}),
    "UMT5": ("UMT5", {**_T5_SIZES, "tie_word_embeddings": False}),
}


SPEECH: dict[str, tuple[str, dict[str, Any]]] = {
    "Moonshine": (
        "Moonshine",
        {
            **_IDS,
            "decoder_start_token_id": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "Whisper": (
        "Whisper",
        {
            **_SIZES,
            "num_mel_bins": 8,
            "max_source_positions": 25,
            "max_target_positions": POSITIONS,
            "suppress_tokens": [],
            "begin_suppress_tokens": [2],
        },
    ),
    "Speech2Text": (
        "Speech2Text",
        {
            **_SIZES,
            "input_feat_per_channel": 8,
            "conv_channels": 32,
            "max_source_positions": 200,
            "max_target_positions": POSITIONS,
        },
    ),
}


def make(cls: str, options: dict[str, Any]) -> Any:
    """Build a random model whose weights are large enough for masks and positions to matter."""
    config = getattr(transformers, f"{cls}Config")(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        speech = cls in {name for name, _ in SPEECH.values()}
        auto: Any = transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
        model: Any = auto.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if name not in (model._keys_to_ignore_on_save or ()):  # tables of sines, which the class makes
                parameter.data += 0.15 * torch.randn(parameter.shape)
        if not options.get("tie_word_embeddings", True) and hasattr(model, "shared"):
            # Configurations of T5 kinds tie whatever they are told; checkpoints have a head of their own.
            model.lm_head.weight = torch.nn.Parameter(0.15 * torch.randn(model.lm_head.weight.shape))
    return model.requires_grad_(False)


def steps_of(graph: Any, ids: torch.Tensor, source: list[torch.Tensor], steps: list[int]) -> torch.Tensor:
    """Return the logits of a captured graph that takes the target's tokens in steps."""
    layers, begin, found = graph.meta["model"].layers, 0, []
    caches = empty_caches(graph.meta["model"], len(ids), ids.shape[1])
    for step in steps:
        here, position = slice(begin, begin + step), torch.arange(begin, begin + step)
        given = (ids[:, here], position, torch.arange(step), caches[:layers], caches[layers:])
        out, keys, values = graph(*given, *source)
        for cache, new in zip(caches, [*keys, *values], strict=True):
            cache[:, :, here] = new
        found.append(out)
        begin += step
    return torch.cat(found, dim=1)


def relative(got: Any, expected: Any) -> float:
    """Return the root mean square of the error over that of what is expected."""
    difference = torch.as_tensor(got).double() - torch.as_tensor(expected).double()
    return float(difference.norm() / torch.as_tensor(expected).double().norm())


def save(folder: Path, cls: str, options: dict[str, Any]) -> Any:
    """Save a family's model in a folder with a tokenizer, and return it."""
    model = make(cls, options)
    if cls == "Whisper":  # of many languages, as those of the hub
        words = {"lang_to_id": {"<|en|>": 90, "<|de|>": 91}, "task_to_id": {"transcribe": 92, "translate": 93}}
        words |= {"no_timestamps_token_id": 95, "is_multilingual": True, "language": "de", "task": "translate"}
        for key, value in {**words, "suppress_tokens": [88, 96], "begin_suppress_tokens": [2, 49]}.items():
            setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    if cls == "Moonshine":
        transformers.Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(folder)
    if cls == "Whisper":
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=320).save_pretrained(folder)
    if cls == "Speech2Text":
        transformers.Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def expected_tokens(model: Any, source: torch.Tensor, count: int) -> list[int]:
    """Return what transformers generates greedily, behind the token that the decoder begins with.

    Of Whisper, transformers leaves what the decoder begins with out itself.
    """
    whisper = model.config.model_type == "whisper"
    found = model.generate(source, do_sample=False, num_beams=1, max_new_tokens=count)
    return [int(token) for token in found[0, 0 if whisper else 1 :]]


def take_stored_weights(model: Any, bundle: Path) -> None:
    """Give the model the weights that the bundle's packed ones stand for."""
    file = bundle / "weights.safetensors"
    stored, modules = load_file(file) if file.exists() else web_tensors(bundle), dict(model.named_modules())
    for site in json.loads((bundle / "manifest.json").read_text())["sites"]:
        fmt, weight = Format.parse(site["format"]), modules[site["site"]].weight
        parts = [stored[f"{site['site']}.{part}"] for part in fmt.parts(*weight.shape)]
        with torch.no_grad():
            weight.copy_(dequantize(PackedWeight.of(parts, fmt, tuple(weight.shape))))
