"""A package of plug-ins: built and installed by pip, listed, and used by name through the command."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from missing import skip_or_fail
from safetensors.torch import load_file
from tiny_models import save_model

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.registry import ALTERNATIVES

PACKAGE = Path(__file__).resolve().parents[1] / "support" / "example_plugin"
RECIPE = """model: model
evaluation: {text: text.txt, tokens: 96}
passes:
  - clip_outliers: {deviations: 2.0, ignore: [lm_head]}
  - rtn: {scheme: W4A16_G32, ignore: [lm_head]}
exports:
  - {to: marlin, check: false}
target: "null"
tune: "off"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the example's wheel and install it into a folder, without network."""
    if missing := [name for name in ("hatchling", "pip") if importlib.util.find_spec(name) is None]:
        skip_or_fail(f"{' and '.join(missing)} not installed: pip install 'compressor[test]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--no-compile", "--target", str(folder), str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(installed))
    return installed


def call(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), prog_name="compress")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_installed_package_is_listed_with_its_version_and_its_place(on_path: Path) -> None:
    listed = json.loads(call("list", "plugins", "--json"))
    whence = f"compressor-example 0.3.0 ({on_path})"
    wanted = {
        "pass clip_outliers": "Clip each row of the matched linears",
        "export marlin": "Hold symmetric integers of 4 or 8 bits",
        "alternative first_half": "Keep the more important half",
    }
    for name, summary in wanted.items():
        assert listed[name].startswith(f"{whence}: {summary}")
    shown = call("show", "clip_outliers")
    assert "deviations: 4.0" in shown and "standard deviations, is clipped" in shown
    assert "clip_outliers" in json.loads(call("list", "passes", "--json"))
    assert ALTERNATIVES.find("first_half").__name__ == "FirstHalf"


@pytest.mark.usefixtures("no_speed")
def test_a_recipe_uses_them_by_name(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 4
    Path("text.txt").write_text(text, encoding="utf-8")
    save_model(tmp_path / "model", text)
    Path("recipe.yaml").write_text(RECIPE)
    content = json.loads(call("run", "recipe.yaml", "-o", "bundle", "--json"))
    steps = [site["pass_name"] for site in content["sites"]]
    assert [step["name"] for step in content["passes"]] == ["capture", "clip_outliers", "rtn"]
    assert steps == ["clip_outliers"] * 7 + ["rtn"] * 7
    assert all("weights clipped" in site["note"] for site in content["sites"][:7])
    lock = json.loads(Path("bundle/compress.lock").read_text())
    assert lock["versions"]["compressor-example"] == "0.3.0"
    assert lock["recipe"]["passes"][0] == {
        "clip_outliers": {"deviations": 2.0, "targets": "Linear", "ignore": ["lm_head"]}
    }

    exported = capture(tmp_path / "bundle-marlin")
    dense = load_file("model/model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    weight = dense[f"{name}.weight"].double()
    mean, spread = weight.mean(1, keepdim=True), 2 * weight.std(1, keepdim=True, correction=0)
    clipped = torch.minimum(torch.maximum(weight, mean - spread), mean + spread)
    groups = clipped.reshape(len(clipped), -1, 32)
    found = exported.get_parameter(f"{name}.weight").double().reshape(groups.shape)
    assert bool(((found - groups).abs() <= groups.abs().amax(-1, keepdim=True) / 14).all())


def test_what_is_broken_is_named_with_the_reason(installed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(installed, tmp_path / "site")
    module = folder / "compressor_example"
    clip = module / "clip_outliers.py"
    clip.write_text(clip.read_text().replace("sites import change_site,", "sites import replace_site,"))
    (module / "first_half.py").write_text("import no_such_package\n" + (module / "first_half.py").read_text())
    (module / "marlin.py").unlink()
    others = {
        "shipped": ("compressor.targets", "x86"),
        "rival": ("compressor.passes", "twice"),
        "other": ("compressor.passes", "twice"),
    }
    for package, (group, name) in others.items():
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:Class\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}

    def compress(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from compressor.cli.commands import main; main(prog_name='compress')"]
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, env=environment, timeout=120, check=False
        )

    done = compress("list", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    whence = f"compressor-example 0.3.0 ({folder}): BROKEN: "
    assert listed["pass clip_outliers"] == (
        f"{whence}pass 'clip_outliers': compressor_example.clip_outliers imports replace_site from "
        "compressor.pipeline.sites, which this version does not have"
    )
    assert listed["alternative first_half"].endswith("imports no_such_package, which is not installed")
    assert listed["export marlin"].startswith(whence) and "no module named" in listed["export marlin"]
    assert listed["target x86"].startswith(f"shipped 1.0 ({folder}): UNUSED: ")
    assert listed["pass twice"].startswith("BROKEN: claimed by") and listed["pass twice"].count(" 1.0 ") == 2

    (tmp_path / "recipe.yaml").write_text("passes: [{clip_outliers: {}}]\nmodel: reference\n")
    done = compress("plan", str(tmp_path / "recipe.yaml"))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"repair or uninstall compressor-example 0.3.0 ({folder})" in done.stderr
