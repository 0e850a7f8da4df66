"""Image classifiers through the command line alone: folder or archive, pictures, gates, bundle, evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from tiny_images import CLASSES, NAMED, SIDE, SIZES, classifier, pictures, resnet, save
from web_bundles import in_node

from compressor.cli.commands import main
from compressor.codegen.web.session import WebBundle
from compressor.data.images import load_images
from compressor.graph.model import ModelInfo
from compressor.recipe.recipe import Recipe, load_recipe
from compressor.run.job import run_recipe

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytestmark = pytest.mark.usefixtures("captures_once")
RECIPE = "gptq_w8a8_images_x86"
GROUPS = "group_sparse_w8a8_images_x86"


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: str | Path) -> Any:
    done = command(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def settings(**changes: Any) -> list[str]:
    """Return options that change a shipped recipe."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def relabelled(model: Any, folder: Path, source: Path) -> Path:
    """Put each picture into the folder of the class that the model finds in it."""
    recipe = {"passes": [{"rtn": {"scheme": "W8A8"}}], "evaluation": {"images": str(source)}}
    images = load_images(Recipe.from_dict(recipe).evaluation, ModelInfo("module", "", "", source=folder))
    with torch.no_grad():
        found = model(pixel_values=images.inputs()).logits.argmax(1).tolist()
    for number, (label, path) in enumerate(zip(found, sorted(source.rglob("*.*g")), strict=True)):
        (source.parent / "sorted" / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        path.rename(source.parent / "sorted" / CLASSES[label] / f"{number}{path.suffix}")
    return source.parent / "sorted"


def test_a_folder_becomes_a_bundle(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    model = classifier(resnet(stages=1))
    folder = save(model, tmp_path / "resnet")
    data = relabelled(model, folder, pictures(tmp_path / "pictures"))
    gates = {"accuracy": ">= 90%", "top1_agreement": ">= 90%", "batch_independent": True}
    bundle = tmp_path / "bundle"
    given = {"calibration": {"images": str(data), "samples": 8}, "evaluation": {"images": str(data)}, "gates": gates}
    result = answer(
        "run", RECIPE, "--model", folder, *settings(tune="off", target={"x86": {"isa": "avx2"}}, **given), "-o", bundle
    )
    assert set(result["gates"]) == set(gates) and result["dense_accuracy"] == 1
    assert result["images"] == 12
    assert (bundle / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    lock = json.loads((bundle / "compress.lock").read_text())
    assert "preprocessor_config.json" in lock["model"]["files"]
    assert command("verify", bundle).exit_code == 0
    measured = answer("eval", bundle, "--data", data, "--dense", folder)
    for key in ("accuracy", "dense_accuracy", "top1_agreement"):
        assert measured[key] == result[key]
    assert answer("eval", folder, "--data", data)["accuracy"] == 1
    for path in (bundle, folder):
        done = command("bench", path)
        assert done.exit_code == 2 and "time your own call of it" in done.output


def test_convolutions_that_skip_groups(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    folder, bundle = save(classifier(resnet(stages=1)), tmp_path / "resnet"), tmp_path / "bundle"
    images = {"images": str(pictures(tmp_path / "pictures")), "samples": 8}
    given = {
        "calibration": images,
        "evaluation": {"images": images["images"]},
        "gates": {"batch_independent": True},
        "tune": "off",
        "target": {"x86": {"isa": "avx2"}},  # the quickest to generate
    }
    result = answer("run", GROUPS, "--model", folder, *settings(**given), "-o", bundle)
    sparse = {site["site"] for site in result["sites"] if site["format"] == "W8A8_STATIC_B32x4@30"}
    assert len(sparse) == 2 and any("3 channels are not a multiple of 4" in note for note in result["notes"])
    assert command("verify", bundle).exit_code == 0
    planned = answer("plan", GROUPS, "--model", folder, *settings(**given))
    stored = {site["site"]: site["bytes_after"] for site in result["sites"]}
    assert planned["weight_bytes"] == result["weight_bytes"] and sum(stored.values()) < result["weight_bytes"]
    listed = {site["site"]: site for site in answer("inspect", bundle)["sites"]}
    assert all(listed[name]["format"] == "W8A8_STATIC_B32x4@30" for name in sparse)


def test_convolutions_that_skip_groups_in_webassembly(tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    """The bundle says what eager PyTorch says, in wasmtime and in Node, on one thread and on two."""
    require_tool("wasm-ld")
    require_tool("node", 20)
    folder, bundle = save(classifier(resnet(stages=1)), tmp_path / "resnet"), tmp_path / "bundle"
    images = {"images": str(pictures(tmp_path / "pictures")), "samples": 8}
    given = {"calibration": images, "evaluation": {"images": images["images"]}, "gates": {"top1_agreement": ">= 90%"}}
    result = answer("run", "group_sparse_w8a8_images_wasm", "--model", folder, *settings(**given), "-o", bundle)
    assert sum(site["format"] == "W8A8_STATIC_B32x4@30" for site in result["sites"]) == 2
    assert result["kernel_error"] < 1e-3 and not (bundle / "index.html").exists()
    assert command("verify", bundle).exit_code == 0
    assert "without a page" in command("serve", bundle).output
    x = np.random.default_rng(0).standard_normal((2, 3, SIDE, SIDE), np.float32)
    expected = WebBundle(bundle, "wasm").classes(x)
    body = """
      const { load } = await import(`file://${bundle}/runner.js`);
      const other = await load(bundle, { threads: 2 });
      const calls = [[given, 3], [given, 0], [given.slice(1), 2]];
      const wrong = calls.map((x) => model.run(...x).catch((error) => error.code));
      const webgpu = await load(bundle, { device: "webgpu" }).catch((error) => error.code);
      const runs = [await model.run(given, 2), await other.run(new Float32Array(given), 2)];
      const one = await model.run(given.slice(0, given.length / 2));
      return [...[...runs, one].map(({ data, shape }) => [[...data], shape]), await Promise.all(wrong), webgpu];
    """
    *runs, wrong, webgpu = in_node(bundle, body, x.ravel().tolist())
    assert wrong == ["request"] * 3 and webgpu == "no-webgpu"
    for (data, shape), count in zip(runs, (2, 2, 1), strict=True):
        assert shape == [count, len(CLASSES)]
        assert np.array_equal(np.float32(data).reshape(shape), expected[:count])


def test_what_webassembly_alone_does_not_serve(tmp_path: Path) -> None:
    save(classifier(transformers.ViTConfig(**SIZES, **NAMED)), tmp_path / "vit")
    pictures(tmp_path / "pictures")
    content = {"model": "vit", "passes": [{"rtn": {"scheme": "W4A16_G32"}}], "target": "wasm"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    planned = answer("plan", tmp_path / "recipe.yaml")
    assert planned["weight_bytes"] < planned["dense_weight_bytes"]
    done = command("plan", "quickstart", "--set", "target=wasm")
    assert done.exit_code == 2 and "the target wasm serves image classifiers, this is a decoder" in done.output


def test_vit_is_planned_and_lowered_and_mistakes_end_before_any_work(tmp_path: Path) -> None:
    save(classifier(transformers.ViTConfig(**SIZES, **NAMED)), tmp_path / "vit")
    data = pictures(tmp_path / "pictures")
    file = tmp_path / "recipe.yaml"
    content = {
        "model": "vit",
        "calibration": {"images": "pictures", "samples": 4},
        "passes": [{"gptq": {"scheme": "W4A16_G32"}}],
        "target": "null",
    }
    file.write_text(json.dumps(content))
    planned = answer("plan", file)
    run = answer("run", file, "-o", tmp_path / "bundle")
    assert run["weight_bytes"] == planned["weight_bytes"] < planned["dense_weight_bytes"] / 2
    (data / "cat" / "0.png").write_bytes(b"\x89PNG torn")
    for words, message in (
        (["run", file, "-o", tmp_path / "none"], "cat/0.png: a damaged picture"),
        (["plan", file], "cat/0.png: a damaged picture"),
        (["run", file, "-o", tmp_path / "none", "--set", "calibration={images: empty}"], "'empty' is missing"),
        (["eval", tmp_path / "vit"], "`text` does not fit: vit is calibrated and evaluated on images"),
        (["eval", tmp_path / "vit", "--data", tmp_path / "none.pt2"], "none.pt2"),
        (["plan", file, "--model", "none.pt2"], "'none.pt2': no such file"),
    ):
        done = command(*words)
        assert done.exit_code == 2 and message in done.output, done.output
        assert not (tmp_path / "none").exists()


def test_an_archive_is_a_model_of_a_recipe(tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(30), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    example = (torch.zeros(2, 3, SIDE, SIDE),)
    torch.export.save(torch.export.export(net.eval(), example, dynamic_shapes=shapes), tmp_path / "net.pt2")
    data = {"images": str(pictures(tmp_path / "pictures")), "mean": 0.5, "std": 0.5, "resize": SIDE, "crop": SIDE}
    content = {"calibration": {**data, "samples": 4}, "target": "null", "gates": None}
    run = answer("run", RECIPE, "--model", tmp_path / "net.pt2", *settings(**content), "-o", tmp_path / "bundle")
    assert [site["site"] for site in run["sites"]] == ["0", "4"]
    lock = json.loads((tmp_path / "bundle" / "compress.lock").read_text())
    assert set(lock["model"]["files"]) == {"net.pt2"}
    assert [site["site"] for site in answer("inspect", tmp_path / "net.pt2")["linears"]] == ["0", "4"]
    recipe = load_recipe(RECIPE, settings(**content)[1::2])
    python = run_recipe(recipe, tmp_path / "python", model=net, example=example, dynamic_shapes=shapes)
    assert json.loads(json.dumps(python.sites)) == run["sites"]
