"""Preprocessing is transformers' own, and equals the definition where that is simple."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import PREPROCESSOR, SIDE

from compressor.data.preprocessing import Processed, Scaled, preprocessing
from compressor.errors import CaptureError, UsageError
from compressor.recipe.recipe import Recipe

image_module = pytest.importorskip("PIL.Image")
MEAN, STD = (np.array(PREPROCESSOR[key]).reshape(3, 1, 1) for key in ("image_mean", "image_std"))
PICTURES = [np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), dtype=np.uint8) for i in range(3)]


def spec(**keys: Any) -> Any:
    evaluation = {"images": "a.npz", **keys}
    return Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A8"}}], "evaluation": evaluation}).evaluation


def write(folder: Path, **changes: Any) -> Path:
    content = {key: value for key, value in {**PREPROCESSOR, **changes}.items() if value is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    return folder


def expected(picture: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    resized = image_module.fromarray(picture).resize(size, resample)
    result: np.ndarray = (np.asarray(resized, np.float64).transpose(2, 0, 1) / 255 - MEAN) / STD
    return result


def test_a_folder_s_preprocessor_is_used(tmp_path: Path) -> None:
    made = preprocessing(spec(), write(tmp_path), 3, "")(PICTURES)
    assert made.shape == (3, 3, SIDE, SIDE) and made.dtype == torch.float32
    for one, picture in zip(made.numpy(), PICTURES, strict=True):
        np.testing.assert_allclose(one, expected(picture, (SIDE, SIDE), 2), atol=1e-5)
    other = preprocessing(spec(), write(tmp_path, image_std=[1, 1, 1]), 3, "")
    assert isinstance(other, Processed) and other.facts() != preprocessing(spec(), write(tmp_path), 3, "").facts()


def test_a_preprocessor_that_crops_gives_the_middle(tmp_path: Path) -> None:
    changes = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40}, "crop_size": 24}
    (made,) = preprocessing(spec(), write(tmp_path, **changes), 3, "")(PICTURES[:1])  # 40x50: nothing to resize
    np.testing.assert_allclose(
        made.numpy(), ((PICTURES[0][8:32, 13:37].transpose(2, 0, 1) / 255) - MEAN) / STD, atol=1e-5
    )


def test_keys_of_the_recipe_replace_it(tmp_path: Path) -> None:
    keys = {"mean": PREPROCESSOR["image_mean"], "std": PREPROCESSOR["image_std"]}
    scaled = preprocessing(spec(**keys), write(tmp_path), 3, "")
    assert isinstance(scaled, Scaled)
    np.testing.assert_allclose(scaled(PICTURES[:1])[0], (PICTURES[0].transpose(2, 0, 1) / 255 - MEAN) / STD, atol=1e-6)
    (made,) = preprocessing(spec(**keys, resize=20, crop=16), None, 3, "")(PICTURES[:1])
    bicubic = expected(PICTURES[0], (25, 20), 3)[:, 2:18, 4:20]
    np.testing.assert_allclose(made.numpy(), bicubic, atol=1e-5)
    (cropped,) = preprocessing(spec(crop=16), None, 3, "")(PICTURES[:1])
    np.testing.assert_allclose(cropped.numpy(), PICTURES[0][12:28, 17:33].transpose(2, 0, 1) / 255, atol=1e-6)


def test_what_is_missing_or_no_preprocessor_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preprocessor_config\.json; .* or give the data `mean` and `std`"):
        preprocessing(spec(), tmp_path, 3, "")
    with pytest.raises(UsageError, match="not a preprocessor that transformers can build"):
        preprocessing(spec(), write(tmp_path, image_processor_type="Nobody"), 3, "")
    with pytest.raises(UsageError, match="fails on a picture"):
        preprocessing(spec(), write(tmp_path, image_mean=[0.5, 0.5]), 3, "")(PICTURES)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(CaptureError, match="not a JSON object"):
        preprocessing(spec(), tmp_path, 3, "")
    with pytest.raises(UsageError, match="mean has 2 numbers, and the images 3 channels"):
        preprocessing(spec(mean=[0.5, 0.5]), None, 3, "data")
