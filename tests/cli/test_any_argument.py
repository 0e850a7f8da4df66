"""Every command with arguments of any kind: a result, or one sentence and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from arguments import any_argument, texts
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from missing import skip_or_fail
from tiny_bundle import TinyLanguageModel, write_tiny_bundle
from tiny_models import save_model

from compressor.cli.commands import main

pytestmark = pytest.mark.usefixtures("captures_once")

RECIPE = (
    "model: model\ncalibration: {text: text.txt, samples: 2, sequence_length: 32}\n"
    'evaluation: {text: text.txt, tokens: 96}\npasses: [rtn: {scheme: W4A16_G32}]\ntarget: "null"\ntune: "off"\n'
)
GOOD = {  # by parameter; some of what it may be
    "recipe": ("recipe.yaml", "quickstart"),
    "model": ("model", "reference"),
    "target": ("null", "wasm", "x86", "webgpu"),
    "output": ("out", "bundle"),
    "path": ("bundle", "model"),
    "bundle": ("bundle",),
    "overrides": ("seed=3", "passes.rtn.group_size=64"),
    "tokens": ("64", "96"),
    "data": ("text.txt",),
    "dense": ("model",),
    "name": ("gptq", "W4A16", "quickstart"),
    "what": ("passes", "formats"),
    "key": ("file",),
    "export_batch": ("out", "empty"),
    "import_results": ("file", "bundle"),
    "batch": ("empty", "2"),
    "host": ("127.0.0.1", "::1"),
    "database": ("file",),
}


def commands(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield (*before, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a bundle, a model, a recipe and what is none of these."""
    root = tmp_path_factory.mktemp("any")
    write_tiny_bundle(root, TinyLanguageModel())
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 4
    (root / "text.txt").write_text(text, encoding="utf-8")
    save_model(root / "model", text)
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "empty").mkdir()
    (root / "file").write_text("no key, no text, no recipe")
    (root / "loop").symlink_to("loop")
    return root


FLAGS = ("--locked", "--time-passes", "--probe", "--partial", "--check")


@st.composite
def lines(draw: st.DrawFn, names: tuple[str, ...]) -> list[str]:
    """Write a command: most of its arguments there, some options, half of the values sensible."""
    command: Any = main
    for name in names:
        command = command.commands[name]
    line = list(names)
    for parameter in command.params:
        good = GOOD.get(parameter.name, ("1", "2"))
        value = draw(st.sampled_from(good) | texts)
        if isinstance(parameter, click.Argument):
            line += [value] if draw(st.integers(0, 9)) else []
        elif parameter.required or draw(st.integers(0, 3)) == 0:
            line += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], value]
    return line + ([draw(texts)] if draw(st.integers(0, 19)) == 0 else [])


async def ends_at_once(_server: Any) -> None:
    """Stand for a server's time between its start and its end."""


@pytest.mark.parametrize("names", commands(main), ids="_".join)
def test_any_argument(names: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if names == ("device", "serve"):
        monkeypatch.setattr("compressor_runtime.remote.server._Server.run", lambda _server: None)
    if names == ("serve",):
        try:
            monkeypatch.setattr("compressor_runtime.server.protocol.Server.main_loop", ends_at_once)
        except ImportError as error:
            skip_or_fail(error)

    @any_argument
    @given(line=lines(names))
    def check(line: list[str]) -> None:
        result = CliRunner().invoke(main, line, prog_name="compress")
        assert result.exception is None or isinstance(result.exception, SystemExit), line
        assert "Traceback" not in result.stderr, line
        assert result.exit_code in (0, 1, 2, 3, 4, 5), line
        if result.exit_code:
            assert "error: " in result.stderr.lower(), line
        before = line[line.index("--json") - 1] if "--json" in line else ""
        is_value = before.startswith("--") and before not in FLAGS  # of the option before it
        if "--json" in line and not is_value and "-h" not in line and result.stdout:
            assert isinstance(json.loads(result.stdout), dict), line

    check()
