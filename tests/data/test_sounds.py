"""Sounds with their texts: read from folders and rows, as a model hears and writes them, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_sounds import tone, write_sounds, write_wave
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from compressor.data.load import load_data
from compressor.data.sounds import Sounds, load_evaluation_sounds, load_sound_samples
from compressor.errors import CompressorError
from compressor.graph.kinds.encoder_decoder import Pair
from compressor.graph.model import ModelInfo, SourceInfo
from compressor.recipe.recipe import Recipe, load_text_spec

TEXTS = ["w5 w6", "w7", "w8 w9 w10", "w5"]
FEATURES = {"method": "samples", "sampling_rate": 16_000, "normalize": False}
SOURCE = SourceInfo("audio", (0,), 0, start_ids=(1,), features=FEATURES, min_positions=400)


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    """Describe a model of speech with a tokenizer of words."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(20)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts: dict[str, Any] = {"vocab_size": 20, "max_positions": 6, "eos_ids": (2,), "encoder_source": SOURCE}
    return ModelInfo("seq2seq", "tiny", "", source=folder, **facts)


def recipe(folder: Path, **more: Any) -> Recipe:
    spec = {"audio": str(folder), "samples": 2, **more.pop("calibration", {})}
    return Recipe.from_dict({"calibration": spec, "passes": [{"rtn": {"scheme": "W8A8"}}], **more})


def test_a_folder_is_heard_and_written_as_the_model_does(tmp_path: Path, info: ModelInfo) -> None:
    folder = write_sounds(tmp_path / "speech", TEXTS)
    samples, data = load_data(recipe(folder), info)
    assert samples is not None and isinstance(data, Sounds)
    assert samples.facts() == {"source": str(folder), "samples": 2, "sha256": samples.sha256}
    assert {len(pair.ids[0]) for pair in samples.ids} <= {2, 3, 4} and len(data) == 2
    everything = load_evaluation_sounds(load_text_spec(str(folder), evaluation=True), None, info)
    assert everything is not None
    for number, text in enumerate(TEXTS):
        ids = [1, *(int(word[1:]) for word in text.split())]
        assert everything.spoken(number).tolist() == [*ids, 2]
        pair = everything.batch(number)
        assert pair.ids.tolist() == [ids] and everything.text(number) == text
        assert pair.source.shape == (1, 3200 + 160 * number)
        assert np.abs(pair.source[0].numpy() - tone(3200 + 160 * number, number)).max() < 1 / 32000
    drawn = {tuple(pair.ids[0].tolist()) for pair in samples.ids if isinstance(pair, Pair)}
    assert drawn.isdisjoint(tuple(data.batch(i).ids[0].tolist()) for i in range(2))
    again = load_sound_samples(recipe(folder).calibration, info)  # type: ignore[arg-type]
    other = load_sound_samples(recipe(folder, calibration={"seed": 1}).calibration, info)  # type: ignore[arg-type]
    assert again.sha256 == samples.sha256 != other.sha256


def test_tables_and_rows_hold_the_same(tmp_path: Path, info: ModelInfo) -> None:
    pandas = pytest.importorskip("pandas")
    folder = write_sounds(tmp_path / "speech", TEXTS)
    expected = load_sound_samples(recipe(folder).calibration, info)  # type: ignore[arg-type]
    rows = [{"file_name": f"{i}.wav", "said": text} for i, text in enumerate(TEXTS)]
    (folder / "metadata.csv").unlink()
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    sounds = [{"bytes": (folder / f"{i}.wav").read_bytes(), "path": None} for i in range(len(TEXTS))]
    pandas.DataFrame({"audio": sounds, "said": TEXTS}).to_parquet(tmp_path / "rows.parquet")
    for source in ({"audio": str(folder)}, {"parquet": str(tmp_path / "rows.parquet")}):
        given = {"calibration": {**source, "field": "said", "samples": 2}, "passes": [{"rtn": {"scheme": "W8A8"}}]}
        found = load_sound_samples(Recipe.from_dict(given).calibration, info)  # type: ignore[arg-type]
        assert found.sha256 == expected.sha256
        assert all(torch.equal(a.source, b.source) for a, b in zip(found.ids, expected.ids, strict=True))


def mistakes(folder: Path) -> dict[str, Any]:
    """Return what makes a good folder bad, by what is said of it."""
    table = folder / "metadata.csv"
    return {
        "1 channel at 8000 samples a second; this model": lambda: write_wave(folder / "1.wav", tone(2000), rate=8000),
        "1.wav: holds no samples": lambda: write_wave(folder / "1.wav", tone(0)),
        "1.wav: the sound has 100 samples; this model needs 400": lambda: write_wave(folder / "1.wav", tone(100)),
        "1.wav: not a WAV file": lambda: (folder / "1.wav").write_bytes(b"RIFF torn"),
        "1.wav is missing; correct the table": lambda: (folder / "1.wav").unlink(),
        "1.wav: its text is empty": lambda: table.write_text(table.read_text().replace("w7", "  ")),
        "no text in column 'text'; the columns are file_name, said: set `field`": lambda: write_sounds(
            folder, TEXTS, column="said"
        ),
        "its text has 7 tokens, with those": lambda: write_sounds(folder, ["w4 " * 6] * 4),
        "it gives token 30": lambda: (folder.parent / "model" / "tokenizer.json").write_text(
            (folder.parent / "model" / "tokenizer.json").read_text().replace('"w7": 7', '"w7": 30')
        ),
        "new.wav: metadata.csv does not list it": lambda: write_wave(folder / "new.wav", tone(500)),
        "'../1.wav' is not a WAV file (.wav) in this folder": lambda: table.write_text("file_name,text\n../1.wav,w5"),
        "'1.mp3' is not a WAV file": lambda: table.write_text("file_name,text\n1.mp3,w5"),
        "and it has none": table.unlink,
        "metadata.jsonl:1: not JSON": lambda: (table.rename(folder / "metadata.jsonl")).write_text("{"),
        "there is no sound": lambda: (
            [file.unlink() for file in folder.iterdir()] and table.write_text("file_name,text")
        ),
        "has 4 sounds, and 9 samples are wanted": lambda: {"calibration": {"samples": 9}},
        "is held out": lambda: {"calibration": {"held_out": True}},
        "`tokens` has no meaning": lambda: {"evaluation": {"audio": str(folder), "tokens": 5}},
        "`text` does not fit: tiny is calibrated and evaluated on sound": lambda: {"evaluation": {"text": str(table)}},
        "there are no sounds left": lambda: {
            "calibration": {"samples": 4},
            "gates": {"word_error_rate": "<= 5%"},
        },
    }


@pytest.mark.parametrize("message", mistakes(Path("speech")))
def test_what_cannot_be_used_is_named(message: str, tmp_path: Path, info: ModelInfo) -> None:
    folder = write_sounds(tmp_path / "speech", TEXTS)
    changes = mistakes(folder)[message]()
    with pytest.raises(CompressorError) as caught:
        load_data(recipe(folder, **(changes if isinstance(changes, dict) else {})), info)
    assert message in str(caught.value) and caught.value.exit_code == 2
