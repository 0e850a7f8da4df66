"""Pictures from folders, rows and archives: what they become, and what is refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import CLASSES, PREPROCESSOR, SIDE, pictures

from compressor.data.images import Images, load_images
from compressor.data.labels import class_numbers
from compressor.data.load import load_data
from compressor.data.pictures import decode
from compressor.errors import RecipeError, UsageError
from compressor.graph.model import ModelInfo
from compressor.recipe.recipe import Recipe

image_module = pytest.importorskip("PIL.Image")
INFO = ModelInfo("module", "Net", "Net", image_shape=(3, SIDE, SIDE), classes=3, class_names=CLASSES)
KEYS = {"mean": 0.5, "std": 0.5, "resize": SIDE, "crop": SIDE}
PIXELS = np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def recipe(**keys: Any) -> Recipe:
    return Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A8"}}], **keys})


def images(source: dict[str, Any], info: ModelInfo = INFO) -> Images:
    return load_images(recipe(evaluation={**KEYS, **source}).evaluation, info)


def encoded(pixels: Any, mode: str | None = None, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture = image_module.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(stream, kind, **options)
    return stream.getvalue()


def rows(file: Path, folder: Path, label: Callable[[str], Any]) -> Path:
    """Write the pictures of a folder as parquet, as Hugging Face data sets have them."""
    datasets = pytest.importorskip("datasets")
    files = sorted(folder.rglob("[!.]*.*g"))
    structs = [{"bytes": path.read_bytes(), "path": None} for path in files]
    labels = [label(path.parent.name) for path in files]
    datasets.Dataset.from_dict({"image": structs, "label": labels}).to_parquet(file)
    return file


def test_a_folder_and_rows_hold_the_same_labelled_images(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pictures")
    (folder / ".DS_Store").write_text("hidden files are left out")
    found = images({"images": str(folder)})
    assert len(found) == 12 and found.labels is not None
    names = [Path(found.pictures.name(i)).parent.name for i in range(12)]
    assert [CLASSES[label] for label in found.labels.tolist()] == names
    by_name, by_number = (
        images({"parquet": str(rows(tmp_path / file, folder, label))})
        for file, label in (("a.parquet", str), ("b.parquet", CLASSES.index))
    )
    for other in (by_name, by_number):
        assert other.labels is not None and other.labels.tolist() == found.labels.tolist()
        assert torch.equal(other.inputs(), found.inputs()) and other.sha256 == found.sha256
    assert images({"images": str(folder), "mean": 0.4}).sha256 != found.sha256
    few = images({"images": str(folder)}).picked(torch.tensor([7, 2]))
    assert torch.equal(few.inputs(), found.inputs()[[7, 2]])


def test_a_limit_is_spread_over_all_classes_and_samples_are_drawn(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pictures")
    source = {"images": str(folder), **KEYS}
    loaded = recipe(calibration={**source, "samples": 5}, evaluation={**source, "limit": 3})
    samples, data = load_data(loaded, INFO)
    assert samples is not None and samples.ids.shape == (5, 3, SIDE, SIDE)
    assert isinstance(data, Images) and data.labels is not None and sorted(data.labels.tolist()) == [0, 1, 2]
    assert Recipe.from_dict(loaded.resolved()).resolved() == loaded.resolved()
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.*"))):
        path.rename(flat / f"{number}{path.suffix}")
    assert load_images(recipe(evaluation={"images": str(flat), **KEYS}).evaluation, INFO).labels is None


def test_modes_that_have_one_form_become_rgb() -> None:
    grey = np.repeat(PIXELS[:, :, :1], 3, axis=2)
    assert np.array_equal(decode(encoded(PIXELS), ""), PIXELS)
    assert np.array_equal(decode(encoded(PIXELS[:, :, 0]), ""), grey)
    few = PIXELS // 128 * 255  # eight colours
    assert np.array_equal(decode(encoded(few, "P"), ""), decode(encoded(few), ""))
    exif = image_module.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = decode(encoded(PIXELS, kind="PNG", exif=exif), "")
    assert np.array_equal(turned, np.rot90(PIXELS, -1))


@pytest.mark.parametrize(("content", "words"), [
    (encoded(np.dstack([PIXELS, PIXELS[:, :, 0]])), "its mode is RGBA"),
    (encoded(PIXELS, "CMYK", "JPEG"), "its mode is CMYK"),
    (encoded(PIXELS[:, :, 0].astype(np.uint16)), "its mode is I;16"),
    (encoded(PIXELS)[:120], "a damaged picture"),
    (encoded(PIXELS, kind="BMP"), "neither PNG nor JPEG"),
    (b"", "a damaged picture"),
])  # fmt: skip
def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (pictures(tmp_path / "pictures") / "dog" / "9.png").write_bytes(content)
    with pytest.raises(UsageError, match=rf"dog/9\.png: .*{words}"):
        images({"images": str(tmp_path / "pictures")})


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.data.pictures._MOST_PIXELS", 47)
    with pytest.raises(UsageError, match="8x6 are more than 47 pixels"):
        decode(encoded(PIXELS), "a.png")


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match="there is no image in this folder"):
        images({"images": str(tmp_path / "empty")})
    folder = pictures(tmp_path / "pictures")
    (folder / "cat" / "notes.txt").write_text("a cat")
    with pytest.raises(UsageError, match=r"notes\.txt: not a picture"):
        images({"images": str(folder)})
    (folder / "cat" / "notes.txt").unlink()
    (folder / "cat" / "0.png").rename(folder / "0.png")
    with pytest.raises(UsageError, match="at different depths"):
        images({"images": str(folder)})
    with pytest.raises(RecipeError, match="`sha256` is for files"):
        images({"images": str(folder), "sha256": "0" * 64})


def test_classes_are_numbered_as_the_model_does() -> None:
    named = ModelInfo("module", "Net", "Net", classes=3, class_names=("tench, Tinca tinca", "Great_White shark", "x"))
    assert class_numbers(["great white shark", "Tench", "tinca tinca"], named, "").tolist() == [1, 0, 0]
    assert class_numbers(["10", "2"], named, "").tolist() == [10, 2]
    assert class_numbers(["b", "c", "a", "b"], named, "").tolist() == [1, 2, 0, 1]
    with pytest.raises(UsageError, match="y: not among the classes of Net"):
        class_numbers(["x", "y"], named, "data")
    with pytest.raises(UsageError, match=r"data: has 2 classes \(b, c\), and Net has 3"):
        class_numbers(["b", "c"], named, "data")


@pytest.mark.parametrize(("label", "keys", "words"), [
    (lambda name: CLASSES.index(name) + 1, {}, "row 0: has label 3; labels are 0 to 2, the classes of Net"),
    (lambda name: 0.5, {}, "holds 0.5; wanted: a class's number or name"),
    (lambda name: None if name == "dog" else 0, {}, "row 8: no label in 'label'"),
    (str, {"label": "kind"}, "no label in 'kind'; the fields are image, label"),
    (str, {"field": "picture"}, "no pictures in field 'picture'; the fields are image, label"),
    (str, {"field": "label"}, "holds no bytes of a file, but 'bird'"),
    (str, {"tokens": 50}, "evaluation: `tokens` has no meaning: Net is calibrated and evaluated on images"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused(
    tmp_path: Path, label: Callable[[str], Any], keys: dict[str, Any], words: str
) -> None:
    file = rows(tmp_path / "rows.parquet", pictures(tmp_path / "pictures"), label)
    with pytest.raises(UsageError, match=words):
        load_data(recipe(evaluation={"parquet": str(file), **KEYS, **keys}), INFO)


def test_arrays_are_pixels_or_ready(tmp_path: Path) -> None:
    ready = np.random.default_rng(0).standard_normal((4, 3, SIDE, SIDE)).astype(np.float32)
    labels = np.array([0, 1, 2, 0])
    np.savez(tmp_path / "ready.npz", images=ready, labels=labels)
    source = {"images": str(tmp_path / "ready.npz")}
    found = load_images(recipe(evaluation=source).evaluation, INFO)
    assert np.array_equal(found.inputs().numpy(), ready)
    with pytest.raises(UsageError, match="the model reads as they are; remove mean"):
        images(source)
    for changes, words in (
        ({"images": ready[:, :, 1:]}, r"ready\.npz\[0\]: gives 3x31x32, and Net reads 3x32x32"),
        ({"images": ready * np.inf}, "NaN or infinite"),
        ({"labels": labels - 1}, r"ready\.npz\[0\]: has label -1"),
    ):
        np.savez(tmp_path / "ready.npz", **{"images": ready, "labels": labels, **changes})
        with pytest.raises(UsageError, match=words):
            load_images(recipe(evaluation=source).evaluation, INFO)


def test_text_models_refuse_keys_of_images(tmp_path: Path) -> None:
    text = ModelInfo("decoder", "Llama", "Llama")
    with pytest.raises(UsageError, match="evaluation: `mean` has no meaning: Llama is calibrated"):
        load_data(recipe(evaluation={"parquet": "rows.parquet", "mean": 0.5}), text)
    with pytest.raises(RecipeError, match="`limit` has no meaning without images or audio or parquet or hub"):
        recipe(evaluation={"text": "a.txt", "limit": 5})
    assert PREPROCESSOR["size"]["height"] == SIDE
