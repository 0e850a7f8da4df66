"""Models of speech through the command line: calibrated on sounds, held to word errors, and heard by the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from ctc_models import CTC
from ctc_models import save as save_ctc
from encoder_decoders import SPEECH, expected_tokens, save, take_stored_weights
from tiny_sounds import tone, write_sounds, write_wave

import compressor
from compressor.cli.commands import main
from compressor.evaluate.speech.error_rates import edit_distance

pytestmark = pytest.mark.usefixtures("no_speed")

POSITIONS = 16
RECIPE = "gptq_w4a16_speech_x86"


def command(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: object) -> Any:
    done = command(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def said(model: Any, folder: Path, count: int) -> list[list[str]]:
    """Return the words that transformers' own generation finds in the sounds of a folder."""
    words = []
    for number in range(count):
        samples = np.round(tone(3200 + 160 * number, number).astype(np.float64) * 32767) / 32768
        tokens = expected_tokens(model, torch.from_numpy(samples.astype(np.float32))[None], POSITIONS)
        words.append([f"w{token}" for token in tokens if token != 2])
    return words


def error_rate(found: list[list[str]], texts: list[str]) -> float:
    wrong = sum(edit_distance(text.split(), words) for text, words in zip(texts, found, strict=True))
    return wrong / sum(len(text.split()) for text in texts)


def test_the_recipe_for_speech(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    cls, options = SPEECH["Moonshine"]
    small = {"decoder_num_hidden_layers": 1, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    small["intermediate_size"] = 128  # else this random model repeats itself
    model = save(tmp_path / "model", cls, options | small)
    count = 4
    write_sounds(tmp_path / "sounds", ["w3"] * count)
    texts = [" ".join(words[:6]) for words in said(model, tmp_path / "sounds", count)]
    folder = write_sounds(tmp_path / "sounds", texts)
    settings = [f"calibration.audio={folder}", "calibration.samples=3", f"evaluation={{audio: {folder}}}", "tune=off"]
    settings += ["target={x86: {isa: avx2}}", "gates={word_error_rate: '<= 1000%', top1_agreement: '>= 1%'}"]
    given = [word for setting in settings for word in ("--set", setting)]
    result = answer("run", RECIPE, "--model", tmp_path / "model", *given, "-o", tmp_path / "bundle")
    assert result["sounds"] == count and result["tokens"] == sum(len(text.split()) + 1 for text in texts)
    sites = [site for site in result["sites"] if site["pass_name"] == "gptq"]
    assert len(sites) == 6 + 10 and all(site["error"] < site["rtn_error"] * 1.01 for site in sites)

    dense_rate = error_rate(said(model, folder, count), texts)
    take_stored_weights(model, tmp_path / "bundle")
    heard = said(model, folder, count)
    assert result["dense_word_error_rate"] == pytest.approx(dense_rate)
    assert result["word_error_rate"] == pytest.approx(error_rate(heard, texts))
    assert result["word_error_increase"] == result["word_error_rate"] - result["dense_word_error_rate"]
    assert result["kl_divergence"] > 0 and result["character_error_rate"] > 0

    bundle = compressor.load(tmp_path / "bundle")
    assert "".join(bundle.generate(folder / "1.wav", max_tokens=POSITIONS)).split() == heard[1]
    assert len(set(heard[1])) > 4
    assert answer("generate", tmp_path / "bundle", "--prompt", folder / "1.wav")["text"].split() == heard[1]
    measured = answer("eval", tmp_path / "bundle", "--data", folder, "--dense", tmp_path / "model")
    for key in ("word_error_rate", "dense_word_error_rate", "character_error_rate", "kl_divergence"):
        assert measured[key] == pytest.approx(result[key], rel=1e-4), key
    write_wave(folder / "1.wav", tone(3000), rate=8000, channels=2)
    for words, message in (
        (["run", RECIPE, "--model", tmp_path / "model", *given, "-o", tmp_path / "none"], "2 channels at 8000"),
        (["generate", tmp_path / "bundle", "--prompt", folder / "1.wav"], "2 channels at 8000"),
        (["generate", tmp_path / "bundle", "--prompt", tmp_path / "none.wav"], "not a WAV file"),
        (["eval", tmp_path / "bundle"], "is calibrated and evaluated on sound"),
        (["plan", RECIPE, "--model", tmp_path / "model"], "calibration.audio: 'speech' is missing"),
        (["plan", RECIPE, *given, "--set", "gates={load_s: '<= 1s'}"], "not measured on an encoder-decoder of speech"),
    ):
        done = command(*words, *(["--model", tmp_path / "model"] if words[0] == "plan" and len(words) > 4 else []))
        assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
    assert not (tmp_path / "none").exists()


def test_a_model_of_frames(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    """Tokens are those of transformers' model with the weights that the packed ones stand for."""
    require_tool("g++")
    cls, sizes = CTC["Wav2Vec2"]
    model = save_ctc(tmp_path / "model", cls, sizes | {"num_hidden_layers": 1})
    folder = write_sounds(tmp_path / "sounds", ["one two", "three", "four five"], samples=2400)
    settings = [f"calibration.audio={folder}", "calibration.samples=2", f"evaluation={{audio: {folder}}}", "tune=off"]
    settings += ["target={x86: {isa: avx2}}", "gates={word_error_rate: '<= 1000%', top1_agreement: '>= 1%'}"]
    given = [word for setting in settings for word in ("--set", setting)]
    result = answer("run", "gptq_w4a16_ctc_x86", "--model", tmp_path / "model", *given, "-o", tmp_path / "bundle")
    assert result["sounds"] == 3 and "perplexity" not in result and result["kl_divergence"] > 0
    assert len(result["sites"]) == 7 and all(site["error"] < site["rtn_error"] * 1.01 for site in result["sites"])

    take_stored_weights(model, tmp_path / "bundle")
    bundle, samples = compressor.load(tmp_path / "bundle"), tone(2560, 1)
    heard = np.round(samples.astype(np.float64) * 32767) / 32768
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(tmp_path / "model")
    read = extractor(heard.astype(np.float32), sampling_rate=16_000, return_tensors="pt").input_values
    logits = model.double()(read.double()).logits
    found = bundle.run(read.numpy())
    assert np.linalg.norm(found - logits.numpy()) < 1e-5 * float(logits.norm())
    text = transformers.Wav2Vec2CTCTokenizer.from_pretrained(tmp_path / "model").decode(
        logits[0].argmax(-1), skip_special_tokens=True
    )
    said = answer("generate", tmp_path / "bundle", "--prompt", folder / "1.wav", "--max-tokens", 1000)["text"]
    assert said.strip() == text and len(set(text)) > 3
    measured = answer("eval", tmp_path / "bundle", "--data", folder, "--dense", tmp_path / "model")
    for key in ("word_error_rate", "dense_word_error_rate", "kl_divergence"):
        assert measured[key] == pytest.approx(result[key], rel=1e-4), key
    done = command(
        "run", "gptq_w4a16_ctc_x86", "--model", tmp_path / "model", *given, "--set", "target=webgpu", "-o", "none"
    )
    assert done.exit_code == 2 and "a model of speech" in done.output, done.output
