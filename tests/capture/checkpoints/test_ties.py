"""Ties of a class that a checkpoint contradicts: what is stored under both names counts, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoders import TEXT, save
from safetensors.torch import load_file, save_file

from compressor.capture.capture import capture
from compressor.capture.meta_model import folder_meta_model, memory_meta_model
from compressor.graph.caches import empty_past

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_is_stored_apart(is_equal: bool, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    file, stored = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    if is_equal:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    graph = capture(tmp_path)
    ids, position = torch.arange(6)[None] + 3, torch.arange(6)
    logits = graph(ids, position, position, *empty_past(graph.meta["model"], 1))[0]
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    assert torch.allclose(logits, expected, atol=1e-5)
    said = "lm_head.weight and model.embed_tokens.weight, which LlamaForCausalLM ties, are stored apart: both are kept"
    assert graph.meta["notes"] == ([] if is_equal else [said])
    names = dict(graph.named_parameters())
    assert ("lm_head.weight" in names) is not is_equal
    headers: Any = dict(capture(tmp_path, weights=False).named_parameters())  # plans see the same sites
    assert names.keys() == headers.keys()


def test_a_class_that_always_ties(tmp_path: Path) -> None:
    model = save(tmp_path, *TEXT["FLAN-T5"])
    for made in (folder_meta_model(tmp_path, False), memory_meta_model(model)):
        built = dict(made.model.named_parameters(remove_duplicate=False))
        assert built["lm_head.weight"] is not built["shared.weight"] is built["decoder.embed_tokens.weight"]
        assert len(made.notes) == 1
