"""Encoder-decoders: captured, the graph computes what transformers' model does, in one prompt and in steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import POSITIONS, SPEECH, TEXT, VOCAB, expected_tokens, make, relative, save, steps_of
from tiny_sounds import tone

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.capture.capture import capture
from compressor.capture.seq2seq.audio import whisper_start
from compressor.errors import CaptureError
from compressor.evaluate.speech.listeners import GraphListener
from compressor.graph.kinds.encoder_decoder import Pair
from compressor.graph.sites import Site, linear_sites
from compressor.runtime import source_of

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5  # relative, root mean square: float32 sums in another order
TARGET, SOURCE = 30, 9  # more than the distances that the tiny T5 kinds tell apart
SHOWN = {
    "BART",  # learned positions that begin with 2
    "Marian",  # tables of sines that no checkpoint holds
    "M2M100",  # positions counted from the tokens, in a buffer
    "T5",  # biases of distances, the same in all layers
    "T5Gemma",  # capped scores in both directions, windows in both halves
    "UMT5",  # biases of its own in each layer, and a head that its class ties and the checkpoint does not
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
    assert len(masked) == (4 if name == "T5Gemma" else 3)  # the layers of the encoder, two of the decoder


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
        "0 attend to the encoder's output through",
    ),
    "masks of its own": (lambda: make("Mvp", TEXT["BART"][1]), "applies its masks in code of its own, not through"),
    "experts of its own": (
        lambda: make("NllbMoe", {**TEXT["BART"][1], "num_experts": 2, "encoder_sparse_step": 1}),
        r"model.encoder.layers.0.ffn.experts \(NllbMoeExperts\) calls its experts in code of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason):
        capture(build().eval())


class Rows:
    """A statistic that keeps what it is shown."""

    def __init__(self, _: int) -> None:
        self.rows: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, dense: torch.Tensor) -> None:
        self.rows.append(x.clone())


def calibration_rows(graph: Any, pairs: list[Pair], sites: list[Site]) -> dict[str, torch.Tensor]:
    """Return the rows that each linear reads, as calibration sees them."""
    run: Any = CalibrationRun(graph, pairs, sites, Rows, CalibrationOptions())  # type: ignore[type-var]
    return {site.name: torch.cat(found.rows) for group, found in run.groups() for site in group}


def check_listening(model: Any, graph: Any) -> None:
    """Compare what calibration shows of linears, and what the graph says, with transformers on the same sounds."""
    facts = dataclasses.asdict(graph.meta["model"].encoder_source)
    sounds = [tone(3200 + 160 * number, number) for number in range(2)]
    sources = [torch.from_numpy(source_of(samples, facts)) for samples in sounds]
    pairs = [Pair(source, tokens()[0][:1, : 4 + i]) for i, source in enumerate(sources)]
    sites = linear_sites(graph)
    rows = calibration_rows(graph, pairs, sites)
    expected: dict[str, list[torch.Tensor]] = {site.name: [] for site in sites}
    hooks = [
        module.register_forward_hook(lambda _, given, __, name=name: expected[name].append(given[0].flatten(0, -2)))
        for name, module in model.named_modules()
        if name in expected
    ]
    for pair in pairs:
        model(pair.source, decoder_input_ids=pair.ids)
    for hook in hooks:
        hook.remove()
    for site in sites:
        assert relative(rows[site.name], torch.cat(expected[site.name])) < TOLERANCE, site.name
    listener = GraphListener(graph)
    for samples, source, pair in zip(sounds, sources, pairs, strict=True):
        assert listener.said(samples, 9) == [t for t in expected_tokens(model, source, 9) if t != 2]
        assert relative(listener.told(pair), model(source, decoder_input_ids=pair.ids).logits[0]) < TOLERANCE


def test_biases_of_more_than_near_distances_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    monkeypatch.setattr(T5Attention, "_relative_position_bucket", staticmethod(lambda ahead, **_: ahead.abs() % 8))
    with pytest.raises(CaptureError, match=r"adds biases .* more than the distance of the key, or still change"):
        capture(make(*TEXT["T5"]), weights=False)


@pytest.mark.parametrize("name", sorted(SPEECH))
def test_models_of_speech(name: str, tmp_path: Path) -> None:
    model: Any = save(tmp_path, *SPEECH[name])
    graph, (ids, _) = capture(tmp_path), tokens()
    info = graph.meta["model"]
    for samples in (4000, 2000) if 0 in info.encoder_source.shape else (0,):
        source = torch.randn(2, *info.encoder_source.sized(samples)) * 0.1
        prompt = steps_of(graph, ids, [source], [TARGET])
        assert relative(prompt, model(source, decoder_input_ids=ids).logits) < TOLERANCE
        assert relative(steps_of(graph, ids, [source], [5, *[1] * (TARGET - 5)]), prompt) < TOLERANCE
    if name == "Whisper":
        assert info.encoder_source.start_ids == (2, 91, 93, 95)
    expected = {
        "Moonshine": ("samples", (0,), 1279),
        "Whisper": ("log_mel", (8, 50), 1),
        "Speech2Text": ("filter_banks", (0, 8), 5),
    }[name]
    check_listening(model, graph)
    source_info = info.encoder_source
    assert (source_info.features["method"], source_info.shape, source_info.min_positions) == expected


def test_whisper_begins_as_transformers_lets_it() -> None:
    given = {"lang_to_id": {"<|en|>": 5, "<|de|>": 6}, "task_to_id": {"transcribe": 8, "translate": 9}}
    assert whisper_start(3, {**given, "no_timestamps_token_id": 11}) == (3, 5, 8, 11)
    assert whisper_start(3, {**given, "language": "German", "task": "translate"}) == (3, 6, 9)
    with pytest.raises(CaptureError, match=r"the language is 'french', and lang_to_id has <\|en\|>"):
        whisper_start(3, {**given, "language": "French"})
    assert whisper_start(3, {"forced_decoder_ids": [[1, None], [2, 8]], "no_timestamps_token_id": 11}) == (3, 8, 11)


def test_other_features_of_sound_are_refused(tmp_path: Path) -> None:
    save(tmp_path, *SPEECH["Speech2Text"])
    transformers.Speech2TextFeatureExtractor(feature_size=40, num_mel_bins=40).save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match=r"preprocessor_config.json does not give the 8 bins"):
        capture(tmp_path, weights=False)
    save(tmp_path, *SPEECH["Whisper"])
    (tmp_path / "preprocessor_config.json").write_text('{"feature_extractor_type": "Speech2TextFeatureExtractor"}')
    with pytest.raises(CaptureError, match="Speech2TextFeatureExtractor computes features that no run-time here does"):
        capture(tmp_path, weights=False)
