"""Encoder-decoders: captured, the graph computes what transformers' model does, in one prompt and in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import POSITIONS, TEXT, VOCAB, make, relative, save, steps_of

from compressor.capture.capture import capture
from compressor.errors import CaptureError

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5  # relative, root mean square: float32 sums in another order
TARGET, SOURCE = 12, 9
SHOWN = {
    "BART",  # learned positions that begin with 2
    "Marian",  # tables of sines that no checkpoint holds
    "M2M100",  # positions counted from the tokens, in a buffer
}


def tokens() -> tuple[torch.Tensor, list[torch.Tensor]]:
    rng = np.random.default_rng(1)
    mask = torch.ones(2, SOURCE)
    mask[1, 5:] = 0
    ids, source = (torch.from_numpy(rng.integers(3, VOCAB, (2, length))) for length in (TARGET, SOURCE))
    return ids, [source, mask]


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_prompt_and_steps_are_the_models(name: str, tmp_path: Path) -> None:
    model: Any = save(tmp_path, *TEXT[name])
    graph, (ids, source) = capture(tmp_path), tokens()
    prompt = steps_of(graph, ids, source, [TARGET])
    expected = model(input_ids=source[0], attention_mask=source[1].long(), decoder_input_ids=ids).logits
    assert relative(prompt, expected) < TOLERANCE
    assert relative(steps_of(graph, ids, source, [5, *[1] * (TARGET - 5)]), prompt) < TOLERANCE
    masked = graph.graph.find_nodes(op="call_function", target=torch.ops.compressor.masked_attention.default)
    assert len(masked) == 3  # one layer of the encoder, two of the decoder


def test_padding_of_the_source_changes_nothing() -> None:
    graph, (ids, (source, mask)) = capture(make(*TEXT["BART"])), tokens()
    short = steps_of(graph, ids[1:], [source[1:, :5], torch.ones(1, 5)], [TARGET])
    assert relative(steps_of(graph, ids[1:], [source[1:], mask[1:]], [TARGET]), short) < TOLERANCE


def test_what_a_generation_begins_with_is_read(tmp_path: Path) -> None:
    model = save(tmp_path, *TEXT["BART"])
    settings = {"bad_words_ids": [[7], [2], [3, 4]], "num_beams": 4, "forced_bos_token_id": 5, "suppress_tokens": [9]}
    model.generation_config.update(**settings)
    model.generation_config.save_pretrained(tmp_path)
    graph = capture(tmp_path, weights=False)
    source = graph.meta["model"].encoder_source
    assert (source.start_ids, source.suppressed_ids, source.max_positions) == ((2, 5), (7, 9), POSITIONS)
    assert "num_beams, bad_words_ids of several tokens" in graph.meta["notes"][0]


def test_without_a_start_it_is_refused(tmp_path: Path) -> None:
    save(tmp_path, *TEXT["BART"])
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": [2, 3]}')
    with pytest.raises(CaptureError, match=r"decoder_start_token_id is \[2, 3\]"):
        capture(tmp_path, weights=False)


REFUSED: dict[str, tuple[Any, str]] = {
    "no head": (lambda: transformers.BartModel(transformers.BartConfig(**TEXT["BART"][1])), "does not predict tokens"),
    "a table of its own": (
        lambda: transformers.ProphetNetForConditionalGeneration(
            transformers.ProphetNetConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_encoder_layers=1,
                num_decoder_layers=1,
                num_encoder_attention_heads=2,
                num_decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
            )
        ),
        "takes a|attend|attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason):
        capture(build().eval())
