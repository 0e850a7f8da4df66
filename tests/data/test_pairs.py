"""Pictures with texts: what is drawn for calibration and evaluation, and which mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_images import CLASSES, pictures
from tiny_pairs import END, POSITIONS, pair, save

from compressor.capture.capture import capture
from compressor.data.load import load_data
from compressor.errors import CompressorError, UsageError
from compressor.graph.model import ModelInfo
from compressor.recipe.recipe import Recipe

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, str, Path]:
    """Return the description of a model, and folders of pictures and of the rest."""
    folder = tmp_path_factory.mktemp("pairs")
    data = pictures(folder / "pictures", 2)
    return capture(save(pair("CLIP"), folder / "pair"), weights=False).meta["model"], str(data), folder


def recipe(**content: Any) -> Recipe:
    return Recipe.from_dict({"model": "pair", "passes": [{"gptq": {"scheme": "W4A16_G32"}}], **content})


def test_captions_take_turns_and_classes_become_texts(places: tuple[ModelInfo, str, Path]) -> None:
    info, data, folder = places
    (folder / "captions.txt").write_text("a cat\n\n" + "old " * 40 + "\n", encoding="utf-8")
    captions = str(folder / "captions.txt")
    given = recipe(
        calibration={"images": data, "samples": 5, "captions": captions},
        evaluation={"images": data, "classes": list(CLASSES), "template": "an old {}"},
    )
    samples, scored = load_data(given, info)
    assert samples is not None and scored is not None
    rows = {tuple(sample.ids[0].tolist()) for sample in samples.ids}
    assert rows == {(1, 3, 8, END), (1, *[7] * (POSITIONS - 2), END)}  # the long one is cut off
    assert {sample.source.shape for sample in samples.ids} == {(1, 3, 32, 32)} and samples.facts()["samples"] == 5
    assert scored.ids.tolist() == [[1, 6, 7, word, END] for word in (8, 9, 10)] and bool(scored.mask.all())
    assert scored.images.labels.tolist() == [2, 2, 0, 0, 1, 1]  # folders come in the order of the alphabet
    rest = recipe(calibration={"images": data, "samples": 5, "classes": list(CLASSES)})
    _, left = load_data(rest, info)
    assert left is not None and len(left.images) == 1 and left.facts()["classes"] == 3


ALL = {"images": "{}", "samples": 6, "classes": list(CLASSES)}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"calibration": {"images": "{}", "samples": 4}}, "name a file of `captions`, one a line, or `classes`"),
    ({"evaluation": {"images": "{}"}}, "list them in `classes`"),
    ({"evaluation": {"images": "{}", "classes": ["cat"], "template": "a photo"}}, "write one {}"),
    ({"evaluation": {"images": "{}", "classes": ["cat", "dog"]}}, "bird: not among the classes"),
    ({"calibration": {"images": "{}", "samples": 4, "captions": "none.txt"}}, "captions: 'none.txt' is missing"),
    ({"calibration": {"images": "{}", "samples": 4, "classes": ["cat", "dog", "bird"], "mean": 0.5}}, "gives 3x40x50"),
    ({"calibration": {"text": "a.txt"}}, "calibrated and evaluated on images, and names of their classes"),
    ({"calibration": ALL, "gates": {"accuracy": ">= 50%"}}, "there are no labelled images with `classes`"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_mistakes_are_named(places: tuple[ModelInfo, str, Path], content: dict[str, Any], message: str) -> None:
    info, data, _ = places
    for part in content.values():
        if part.get("images"):
            part["images"] = data
    with pytest.raises(CompressorError) as error:
        load_data(recipe(**content), info)
    assert message in str(error.value)


def test_keys_of_pairs_are_for_pairs(places: tuple[ModelInfo, str, Path]) -> None:
    classifier = ModelInfo("module", "resnet", "")
    with pytest.raises(UsageError, match="`classes` has no meaning: resnet is calibrated and evaluated on images"):
        load_data(recipe(calibration={"images": places[1], "classes": ["cat"]}), classifier)
