"""What the command says without importing anything heavy, and that it is true."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from compressor.cli.catalogue import KINDS
from compressor.cli.commands import main
from compressor.cli.outline import outline
from compressor.errors import CompressorError
from compressor.registry import PASSES, TARGETS, Registry

LIGHT = """
import json, sys, time
from click.testing import CliRunner
from compressor.cli.commands import main
for arguments in json.loads(sys.argv[1]):
    began = time.perf_counter()
    CliRunner().invoke(main, arguments)
    heavy = {"torch", "tvm", "transformers", "onnx", "datasets"} & set(sys.modules)
    assert not heavy and time.perf_counter() - began < 2, (arguments, heavy)
"""


@pytest.mark.parametrize(
    ("registry", "name"), [(registry, name) for registry in (PASSES, TARGETS) for name in registry.names()]
)
def test_an_outline_is_that_of_the_class(registry: Registry, name: str) -> None:
    found, kind = outline(registry, name), registry.find(name)
    assert found.text.startswith(inspect.getdoc(kind) or "")
    described = re.findall(r"^    (\w+): ", found.text.partition("Attributes:\n")[2], re.MULTILINE)
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(kind))
    defaults = {}
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        defaults[field.name] = "required" if required else repr(field.default)
    assert found.defaults == defaults


def test_commands_that_need_no_tensor_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    lists = [["list", what] for what in KINDS]
    shows = [["show", name] for name in ("gptq", "x86", "quickstart", "python_docs", "W4A16_G32", "nothing_like_that")]
    others = [["--help"], ["shwo"], ["run", "no_such_recipe"], ["plan", "quickstrat"], ["cache", "list"]]
    others += [["inspect", str(tmp_path)], ["generate", str(tmp_path), "--prompt", "x"], ["run", "--hlp"], ["init"]]
    command = [sys.executable, "-c", LIGHT, json.dumps([*lists, *shows, *others])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_broken_plug_in_is_named_and_the_others_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plug_in.py").write_text("raise ImportError(")
    (tmp_path / "two_plug_ins.py").write_text(
        "@dataclass(frozen=True)\nclass A(Pass):\n    x: int = 1\n\n@dataclass(frozen=True)\nclass B(Pass):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    places = {"broken": "broken_plug_in", "gone": "no_such_module:X", "two": "two_plug_ins", "one": "two_plug_ins:A"}
    found = [EntryPoint(name, value, PASSES.group) for name, value in places.items()]
    monkeypatch.setattr("compressor.registry.entry_points", lambda group, name=None: found)
    listed = CliRunner().invoke(main, ["list", "passes"]).stdout
    for name, said in (("broken", "cannot be read"), ("gone", "no module named"), ("two", "holds 2 such classes")):
        (line,) = (line for line in listed.splitlines() if line.startswith(f"{name} "))
        assert "BROKEN" in line and said in line
    assert "Round the weights of the matched linears" in listed
    assert outline(PASSES, "one").defaults == {"x": "1"}
    with pytest.raises(CompressorError, match="pass 'gone'"):
        outline(PASSES, "gone")
