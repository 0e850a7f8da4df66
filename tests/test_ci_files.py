"""The Dockerfile and the pipelines of docs/ci.md: each step is a command that exists, with options that it has."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from compressor.cli.commands import main
from compressor.recipe.recipe import load_recipe
from compressor.registry import TARGETS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
YAML = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of the Dockerfile."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest.split()[-1]] = []
        found[[*found][-1]].append((word, rest))
    return found


STAGES = stages()


def scripts() -> Iterator[str]:
    """Yield what pipelines and images run."""
    github, gitlab = (next(one for one in YAML if key in one) for key in ("jobs", "compress"))
    yield from (step["run"] for step in github["jobs"]["compress"]["steps"] if "run" in step)
    yield from gitlab["compress"]["script"]
    for steps in STAGES.values():
        yield from (rest for word, rest in steps if word == "RUN")


def commands() -> Iterator[list[str]]:
    """Yield each command of the scripts, with the Dockerfile's arguments in place."""
    given = dict(rest.split("=", 1) for word, rest in STAGES["bundle"] if word == "ARG")
    for script in scripts():
        for line in re.split(r"\n|&&", script):
            for name, value in given.items():
                line = line.replace(f'"${name}"', value).replace(f"${name}", value.strip('"'))
            if line.strip():
                yield shlex.split(line)


@pytest.mark.parametrize("script", [*dict.fromkeys(scripts())])
def test_a_shell_reads_each_script(script: str) -> None:
    done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_command_of_ours_has_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for program, *arguments in commands():
        if program != "compress":
            assert program in ("pip", "apt-get", "mkdir", "rm"), program
            continue
        command: Any = main.commands[arguments[0]]
        seen.add(arguments[0])
        for one in command.params:
            if isinstance(one, click.Argument):  # the bundle that it names is not here
                monkeypatch.setattr(one, "callback", None)
                monkeypatch.setattr(one, "type", click.STRING)
        parsed = command.make_context(arguments[0], arguments[1:]).params
        if "recipe" in parsed:
            load_recipe(parsed["recipe"], overrides=parsed.get("overrides", ()))
    assert seen == {"plan", "run", "verify", "generate"}


def test_what_pip_is_asked_for_is_what_the_project_declares() -> None:
    wanted = [word for command in commands() if command[:2] == ["pip", "install"] for word in command[2:]]
    named = {word for word in wanted if re.match(r"[a-z]", word) and not word.startswith("http")}
    assert {re.split("[<>=]", word)[0] for word in named} == {
        "torch", "numpy", "tokenizers", "apache-tvm-ffi", "jinja2", "starlette", "uvicorn",
    }  # fmt: skip
    for word in named - {"numpy", "tokenizers"}:
        assert f'"{word}"' in PROJECT, word


def test_the_served_image_has_neither_compiler_nor_torch() -> None:
    served = STAGES["serve"]
    assert served[0][1] == "python:3.11-slim-bookworm AS serve"  # begins anew
    said = " ".join(rest for _, rest in served)
    assert not re.search(r"g\+\+|gcc|clang|ziglang|torch|apt-get|apache-tvm(?!-ffi)|pip install.* \.", said)
    assert ("USER", "nobody") in served and ("COPY", "--from=bundle /bundle /bundle") in served
    assert '"compressor_runtime.server"' in dict(served)["ENTRYPOINT"] and "x86" in TARGETS.names()


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = [word for kind, rest in STAGES["compressor"] if kind == "COPY" for word in rest.split()[:-1]]
    assert copied and "*" in ignored and sorted(copied) == sorted(allowed)
    for name in copied:
        assert (ROOT / name).exists() and any(fnmatch(name, one) for one in allowed)
    hook = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    for folder in re.findall(r'"([\w/]+)"', re.findall(r"for folder in \((.*?)\)", hook)[0]):
        assert folder in copied
