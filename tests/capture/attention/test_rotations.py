"""Rotations that depend on a text's length against transformers', below and above what the model was trained for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from compressor.capture.capture import capture
from compressor.graph.caches import empty_past

RULES: dict[str, dict[str, Any]] = {
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    },
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", RULES)
def test_frequencies_follow_the_length(kind: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=8 if kind == "dynamic" else 32,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **RULES[kind]},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    graph = capture(model)
    past = empty_past(graph.meta["model"], 1)
    seen = []
    for length in (12, 6, 8, 20):  # transformers keeps frequencies from one call to the next; these begin anew
        ids, position = torch.arange(3, 3 + length)[None], torch.arange(length)
        with torch.no_grad():
            wanted, found = model(ids).logits, graph(ids, position, position, *past)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        seen.append(found[0, 3])
    assert float((seen[0] - seen[1]).abs().max()) > 1e-3  # the same tokens, other frequencies
    torch.testing.assert_close(seen[1], seen[2])
