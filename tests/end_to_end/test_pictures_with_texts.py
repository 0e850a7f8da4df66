"""Models of pictures with texts through the command line: folder, pictures and classes' names, bundle, evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from compressor_runtime import RequestError, load
from tiny_images import CLASSES, pictures
from tiny_pairs import END, POSITIONS, pair, save

from compressor.cli.commands import main
from compressor.data.images import load_images
from compressor.graph.model import ModelInfo
from compressor.recipe.recipe import Recipe

pytestmark = pytest.mark.usefixtures("no_speed", "captures_once")

pytest.importorskip("PIL")
RECIPE = "gptq_w4a16_clip_x86"
TEXTS = [f"a photo of a {name}." for name in CLASSES]


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: str | Path) -> Any:
    done = command(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def settings(pictures: Path, **changes: Any) -> list[str]:
    """Return what makes a small run of the shipped recipe."""
    data = {"images": str(pictures), "classes": list(CLASSES)}
    content = {"calibration": {**data, "samples": 8}, "evaluation": data, "tune": "off", **changes}
    content["target"] = {"x86": {"isa": "avx2"}}  # the quickest to generate
    given = {"passes.gptq.scheme": "W4A16_G32", **content}
    return [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def test_a_folder_becomes_a_bundle_of_two_entries(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    """SigLIP has a bias, fills texts up, and pools by attention."""
    require_tool("g++")
    model = pair("SigLIP")
    folder, data, bundle = save(model, tmp_path / "pair", False), pictures(tmp_path / "pictures"), tmp_path / "out"
    gates = {"top1_agreement": ">= 50%", "accuracy_drop": "<= 50%", "batch_independent": True}
    result = answer("run", RECIPE, "--model", folder, *settings(data, gates=gates), "-o", bundle)
    assert result["images"] == 12 and set(result["gates"]) == set(gates)
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert set(manifest["entries"]) == {"main", "text"} and manifest["model"]["pair"]["is_filled"]
    assert len(manifest["sites"]) > 20 and command("verify", bundle).exit_code == 0
    assert json.loads(command("inspect", bundle, "--json").stdout)

    loaded = load(bundle)
    spec = Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A8"}}], "evaluation": {"images": str(data)}}).evaluation
    images = load_images(spec, ModelInfo("module", "", "", source=folder))
    embedded = loaded.embed_pictures(images.inputs().numpy()), loaded.embed_texts(TEXTS)
    for found in embedded:
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    right = loaded.similarity(*embedded).argmax(1) == images.labels.numpy()
    assert right.mean() == result["accuracy"]
    ids = torch.zeros(3, POSITIONS, dtype=torch.int64)
    for row, text in zip(ids, TEXTS, strict=True):
        tokens = torch.tensor(loaded.tokenizer.encode(text).ids)
        row[: len(tokens)] = tokens
    dense = model(pixel_values=images.inputs(), input_ids=ids).logits_per_image  # transformers' own
    assert (dense.argmax(1) == images.labels).double().mean() == result["dense_accuracy"]
    assert loaded.similarity(*embedded) == pytest.approx(dense.numpy(), abs=0.25 * float(dense.std()))

    named = tmp_path / "data.yaml"
    named.write_text(json.dumps({"images": "pictures", "classes": list(CLASSES)}), encoding="utf-8")
    measured = answer("eval", bundle, "--data", named, "--dense", folder)
    for key in ("accuracy", "dense_accuracy", "top1_agreement"):
        assert measured[key] == result[key]
    assert answer("eval", folder, "--data", named)["accuracy"] == result["dense_accuracy"]
    done = command("eval", bundle, "--data", data)
    assert done.exit_code == 2 and "list them in `classes`" in done.output

    one = np.full((1, POSITIONS), END)
    for call, message in (
        (lambda: loaded.embed_pictures(np.zeros((1, 3, 8, 8), np.float32)), "the model takes float32"),
        (lambda: loaded.embed_texts("a cat " * POSITIONS), "shorten it"),
        (lambda: loaded.embed_texts(one + 1), "token ids from"),
        (lambda: loaded.embed_texts(one, one[:, 1:]), "they must agree"),
        (lambda: loaded.similarity(embedded[0], np.zeros((1, 2))), "of one width"),
        (lambda: loaded.encode(one), "only an encoder"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
