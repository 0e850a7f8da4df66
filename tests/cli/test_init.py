"""`compress init`: recipes that a plan accepts, questions on a terminal, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tiny_images import classifier, pictures, resnet, save
from tiny_models import save_model

from compressor.cli.commands import main
from compressor.recipe.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("captures_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("init")
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 8
    (root / "my text.txt").write_text(text, encoding="utf-8")
    save_model(root / "model", text)
    (root / "elsewhere").mkdir()
    return root


@pytest.fixture
def init(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(folder)

    def call(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, ["init", *arguments], prog_name="compress", **options)

    return call


def test_flags_make_a_recipe_that_a_plan_accepts(folder: Path, init: Callable[..., Result]) -> None:
    place = "elsewhere/small.yaml"
    result = init("model", "--bits", "5", "--text", "my text.txt", "--target", "null", "-o", place, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["recipe"] == place and facts["scheme"] == "W5A16_G64" and facts["kind"] == "decoder"
    recipe = load_recipe(place)
    assert recipe.model_source() == folder / "model"  # named from another folder
    assert recipe.calibration is not None and recipe.calibration.sequence_length == 64  # the model's positions
    planned = CliRunner().invoke(main, ["plan", place, "--json"])
    assert planned.exit_code == 0, planned.output
    content = json.loads(planned.stdout)
    assert [step["name"] for step in content["passes"]] == ["gptq", "embedding"]
    assert content["weight_bytes"] == facts["weight_bytes"] < facts["dense_weight_bytes"] / 2
    assert content["dense_weight_bytes"] == facts["dense_weight_bytes"]
    before = (folder / place).read_bytes()
    again = init("model", "--text", "my text.txt", "-o", place)
    assert again.exit_code == 2 and "is there already, and is left as it is" in again.output
    assert (folder / place).read_bytes() == before


def test_a_terminal_is_asked_for_what_is_not_given(
    folder: Path, init: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.cli.groups.init.is_terminal", lambda: True)
    result = init("-o", "asked.yaml", input="model\nnull\n9\n8\nmy text.txt\n")
    assert result.exit_code == 0, result.output
    assert "9 is not in the range" in result.output and "Bits of a weight [4]" in result.output
    content = yaml.safe_load((folder / "asked.yaml").read_text())
    assert content["model"] == "model" and content["target"] == "null"
    assert content["calibration"] == {"text": "my text.txt", "samples": 64, "sequence_length": 64}
    assert content["passes"][0]["gptq"]["scheme"] == "W8A16"


def test_networks_of_images_learn_from_images(init: Callable[..., Result]) -> None:
    save(classifier(resnet()), Path("resnet"))
    pictures(Path("pictures"), 24)
    refused = init("resnet", "--text", "my text.txt", "-o", "resnet.yaml")
    assert refused.exit_code == 2 and "name a folder of them with --images" in refused.output
    result = init("resnet", "--images", "pictures", "--target", "wasm", "-o", "a: #b\n.yaml")
    assert result.exit_code == 0, result.output
    (step,) = load_recipe("a: #b\n.yaml").passes
    assert (step.scheme, step.targets) == ("W8A8", "re:.*")
    assert "#     compress run 'a: #b?.yaml' -o 'build/a: #b?'\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a MODEL"),
        (["model", "--scheme", "W4A16_G32", "--bits", "4"], "leave out --bits"),
        (["model", "--target", "x68"], "nearest: x86"),
        (["model", "-o", "nowhere/a.yaml"], "no such folder"),
        (["modle/"], "neither a folder"),
        (["model"], "has 64 positions"),
        (["model", "--images", "pictures"], "reads text"),
        (["model", "--text", "my text.txt", "--scheme", "W4A16_G7x"], "W4A16_G7"),
        (["model", "--text", "none.txt"], "none.txt"),
    ],
)
def test_bad_wishes_are_answered_in_words(
    folder: Path, init: Callable[..., Result], arguments: list[str], said: str
) -> None:
    before = sorted(folder.iterdir())
    result = init(*arguments)
    assert result.exit_code == 2 and said in result.output, result.output
    assert "Traceback" not in result.output and sorted(folder.iterdir()) == before
