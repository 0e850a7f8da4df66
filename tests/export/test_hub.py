"""Bundles pushed to a hub on this machine by huggingface_hub, in a process of its own as users do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_hub import TOKEN, FakeHub, fake_hub

from compressor.cli.commands import main

COMMAND = "from compressor.cli.commands import main; main()"
Push = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        yield served


@pytest.fixture
def push(hub: FakeHub, tmp_path: Path) -> Push:
    def run(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", **changes,
        }  # fmt: skip
        command = [sys.executable, "-c", COMMAND, "push", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    return run


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Write a folder that is a bundle by its manifest: what it computes is nobody's business here."""
    from compressor.export.manifest import listing, with_total

    folder = tmp_path / "bundle"
    (folder / "deep").mkdir(parents=True)
    for name, content in {
        "model.so": b"x" * 5000,
        "deep/a.py": b"pass\n",
        "README.md": b"---\ntags: [a]\n---\n",
    }.items():
        (folder / name).write_bytes(content)
    manifest: dict[str, Any] = {"format": "compressor bundle", "schema_version": 2, "files": listing(folder, {})}
    (folder / "manifest.json").write_bytes(with_total(manifest))
    (folder / "report.html").write_text("<p>measured</p>")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_is_one_commit_and_is_replaced_only_if_asked(hub: FakeHub, push: Push, bundle: Path) -> None:
    done = push(bundle, "org/name", "--private", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["repository"] == "org/name" and told["commit"].startswith(f"{hub.url}/org/name/commit/")
    there = hub.repositories["org/name"]
    assert {name: there[name] for name in there if name != ".gitattributes"} == contents(bundle)
    assert len(hub.commits["org/name"]) == 1 and hub.private["org/name"] and len(hub.large) == 1

    again = push(bundle, "org/name")
    assert again.returncode == 2 and "holds README.md, deep/a.py, manifest.json and 2 more" in again.stderr
    assert "--replace" in again.stderr and len(hub.commits["org/name"]) == 1

    there["shard.bin"] = b"of another bundle"
    (bundle / "report.html").write_text("<p>measured anew</p>")
    replaced = push(bundle, "org/name", "--replace")
    assert replaced.returncode == 0, replaced.stderr
    assert {name: there[name] for name in there if name != ".gitattributes"} == contents(bundle)
    assert hub.commits["org/name"][1]["parentCommit"] == f"{1:040x}"


def refused(*arguments: str | Path) -> str:
    """Return what is said before the hub is asked: this process is off line."""
    done = CliRunner().invoke(main, ["push", *map(str, arguments)])
    assert done.exit_code == 2 and done.stdout == ""
    return done.stderr


def test_nothing_but_a_whole_bundle_is_pushed(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("private")
    assert "holds notes.txt beside the bundle" in refused(bundle, "org/name")
    (bundle / "notes.txt").unlink()
    (bundle / "model.so").write_bytes(b"y" * 5000)
    assert re.search(r"model\.so: its SHA-256 is not.*nothing was pushed", refused(bundle, "org/name"))
    shutil.rmtree(bundle / "deep")
    assert "deep/a.py: missing" in refused(bundle, "org/name")


@pytest.mark.parametrize("name", ["name", "a/b/c", "org/na me", "org/..", "/x", "org/"])
def test_a_name_that_cannot_be_is_refused(bundle: Path, name: str) -> None:
    assert repr(name) in refused(bundle, name)


def test_refusals_of_the_hub_are_a_sentence(hub: FakeHub, push: Push, bundle: Path) -> None:
    for changes, said in (
        ({"HF_TOKEN": "hf_wrong"}, "the hub refused: "),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be pushed to: "),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be pushed to: "),
    ):
        done = push(bundle, "org/name", **changes)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    hub.full = True
    done = push(bundle, "org/name")
    assert done.returncode == 1 and "the hub refused: " in done.stderr
    assert set(hub.repositories["org/name"]) == {".gitattributes"}
