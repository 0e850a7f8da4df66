"""start.py: what it decides, and what it says when the machine does not let it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "start.py"
WANTED = {"python": "3.11", "place": "/a/.venv", "digest": "1", "extras": "zig"}
CLOSED = "http://127.0.0.1:9/simple"  # nobody listens there


@pytest.fixture(scope="module")
def start() -> ModuleType:
    spec = importlib.util.spec_from_file_location("start", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*arguments: object, script: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
    """start.py in a process without pip's settings of this machine; ``HOME`` is a folder that is not there."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    kept |= {"HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull, **variables}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=kept, cwd="/", capture_output=True, text=True, check=False, timeout=120)


def one_message(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(re.findall("^start.py: ", done.stderr, re.MULTILINE)) == 1
    return done.stderr


# The stamp


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({}, "nothing"),
        ({"extras": "test cuda zig"}, "nothing"),  # more than is wanted
        ({"extras": ""}, "update"),
        ({"digest": "2"}, "update"),
        ({"python": "3.12"}, "rebuild"),
        ({"place": "/b/.venv"}, "rebuild"),  # a folder that was moved: its scripts name the old place
    ],
)
def test_a_stamp_says_what_is_left_to_do(start: ModuleType, change: Mapping[str, str], step: str) -> None:
    assert start.next_step({**WANTED, **change}, WANTED) == step


def test_a_half_made_environment_is_made_anew(start: ModuleType, tmp_path: Path) -> None:
    assert start.read_stamp(tmp_path) is None  # not ours
    start.write_stamp(tmp_path, {})
    assert start.read_stamp(tmp_path) == {} and start.next_step({}, WANTED) == "rebuild"
    (tmp_path / "start.json").write_text('{"python": "3.')
    assert start.read_stamp(tmp_path) == {}
    start.write_stamp(tmp_path, WANTED)
    assert start.read_stamp(tmp_path) == WANTED
    assert [path.name for path in tmp_path.iterdir()] == ["start.json"]


def test_the_digest_is_that_of_all_that_is_installed(start: ModuleType, tmp_path: Path) -> None:
    tree = ast.parse((ROOT / "hatch_build.py").read_text(encoding="utf-8"))
    loops = [ast.literal_eval(node.iter) for node in ast.walk(tree) if isinstance(node, ast.For)]
    assert set(start.SOURCE_FOLDERS) == {"compressor", *loops[0]}

    for name in (*start.SOURCES, *(f"{folder}/file" for folder in start.SOURCE_FOLDERS)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    before = start.source_digest(tmp_path)
    (tmp_path / "compressor" / "__pycache__").mkdir()
    (tmp_path / "compressor" / "__pycache__" / "file.pyc").write_text("1")
    (tmp_path / "file").write_text("not installed")
    assert start.source_digest(tmp_path) == before
    for name in ("pyproject.toml", "start.py", "models/reference/file"):
        (tmp_path / name).write_text("2")
        assert start.source_digest(tmp_path) != before
        (tmp_path / name).write_text("1")
    (tmp_path / "recipes" / "file").rename(tmp_path / "recipes" / "renamed")
    assert start.source_digest(tmp_path) != before


def test_the_digest_takes_no_time(start: ModuleType) -> None:
    began = time.perf_counter()
    start.source_digest()
    assert time.perf_counter() - began < 0.5


# Choices


def test_a_compiler_comes_as_a_wheel_only_where_there_is_none(start: ModuleType, tmp_path: Path) -> None:
    assert start.extras_for("quickstart", str(tmp_path)) == "zig"
    assert start.extras_for("test", str(tmp_path)) == "test cuda zig"
    compiler = tmp_path / "clang++"
    compiler.touch(mode=0o755)
    assert start.extras_for("quickstart", str(tmp_path)) == ""
    assert start.extras_for("test", str(tmp_path)) == "test cuda"


def test_system_packages_are_those_whose_tools_are_missing(start: ModuleType, tmp_path: Path) -> None:
    everything = [*start.SYSTEM_PACKAGES, *start.VULKAN_PACKAGES]
    assert start.missing_packages(str(tmp_path), str(tmp_path)) == everything
    for name in ("g++", "node", "wasm-ld"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "lvp_icd.x86_64.json").touch()
    rest = ["cmake", "make", "qemu-user-static", "g++-aarch64-linux-gnu", "chromium"]
    assert start.missing_packages(str(tmp_path), str(tmp_path)) == rest


@pytest.mark.parametrize(
    ("finds_links", "reachable", "gpu", "options", "words"),
    [
        (True, True, True, [], "NVIDIA"),
        (True, True, False, ["--no-index", "--no-deps"], "find-links"),
        (False, True, False, ["--index-url", "https://download.pytorch.org/whl/cpu"], "CPU build"),
        (False, False, False, [], "CUDA"),
    ],
)
def test_torch_comes_without_cuda_where_that_can_be_had(
    start: ModuleType, finds_links: bool, reachable: bool, gpu: bool, options: list[str], words: str
) -> None:
    said, chosen = start.torch_source(finds_links, reachable, gpu)
    assert chosen == options and words in said


def test_pip_s_settings_are_read_as_pip_reads_them(start: ModuleType, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    assert start.pip_settings(variables) == {"index-url": "https://pypi.org/simple", "cert": ""}
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a/simple/\ncert = /ca%20.crt\n[install]\nindex-url = https://b/simple/\n"
    )
    variables["PIP_CONFIG_FILE"] = str(file)
    assert start.pip_settings(variables) == {"index-url": "https://b/simple", "cert": "/ca%20.crt"}
    variables["PIP_INDEX_URL"] = "https://c/simple"
    assert start.pip_settings(variables)["index-url"] == "https://c/simple"


def test_what_the_script_reads_of_the_project_is_there(start: ModuleType) -> None:
    assert start.declared(r'requires-python = ">=([^"]*)"') == ".".join(map(str, start.OLDEST))
    assert start.declared(r'"(torch[<>=][^"]*)"').startswith("torch>=")
    assert "==" in start.declared(r'(?m)^minilm = \["([^"]*)"')
    with pytest.raises(start.Failure, match="damaged"):
        start.declared("no such (line)")


# What it says


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "TMPDIR"),
        ("Max retries exceeded (Caused by SSLError(... CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        (
            "Retrying ... 'NewConnectionError('Connection refused')'\nERROR: No matching distribution found",
            "PIP_INDEX_URL",
        ),
        ("Download failed after 6 attempts because not enough bytes were received (8.9 MB/100.5 MB)", "TMPDIR"),
        ("ERROR: No matching distribution found for apache-tvm", "Python 3.11"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend", "apt"),
        ("Segmentation fault", "above"),
    ],
)
def test_a_failed_installer_is_explained(start: ModuleType, output: str, remedy: str) -> None:
    assert remedy in start.explain(output)


def test_a_full_disk_is_told_before_anything_is_downloaded(
    start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.require_space(tmp_path, 0)
    with pytest.raises(start.Failure, match=rf"{tmp_path}: .* GB are free on this disk.*1e\+09 GB.*--environment"):
        start.require_space(tmp_path, 1e9)
    monkeypatch.setattr(start.tempfile, "gettempdir", lambda: "/proc")  # a file system without space
    with pytest.raises(start.Failure, match=r"/proc: 0.0 GB are free.* 0.25 GB.*TMPDIR"):
        start.require_space(tmp_path, 1)


def test_an_old_python_gets_as_far_as_the_message() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 7))
    kinds = [type(node).__name__ for node in tree.body]
    assert "If" in kinds and "FunctionDef" not in kinds[: kinds.index("If")]  # annotations would fail there


def test_an_index_out_of_reach(tmp_path: Path) -> None:
    """The first call leaves a half-made environment, and the second begins anew and says the same."""
    folder = tmp_path / "environment"
    for _ in range(2):
        said = one_message(call("--environment", folder, PIP_INDEX_URL=CLOSED))
        assert f"{CLOSED}/pip/" in said and "refused" in said and "PIP_INDEX_URL" in said and "try again" in said
        assert json.loads((folder / "start.json").read_text()) == {}


def test_a_password_in_the_index_is_not_shown(tmp_path: Path) -> None:
    said = one_message(call("--environment", tmp_path / "e", PIP_INDEX_URL="http://me:secret@127.0.0.1:9/simple"))
    assert "http://127.0.0.1:9/simple/pip/" in said and "secret" not in said


def test_an_index_that_is_no_address(tmp_path: Path) -> None:
    assert "nonsense" in one_message(call("--environment", tmp_path / "e", PIP_INDEX_URL="nonsense"))


def test_an_environment_of_someone_s_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    said = one_message(call("--environment", tmp_path, PIP_INDEX_URL=CLOSED))
    assert "not made by start.py" in said and "--environment" in said
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in one_message(call("--environment", tmp_path / "file" / "e", PIP_INDEX_URL=CLOSED))


def test_the_quickstart_takes_no_arguments() -> None:
    done = call("quickstart", "recipe.yaml")
    assert done.returncode == 2 and "recipe.yaml" in done.stderr


# The rest


def test_a_second_call_starts_at_once_and_passes_arguments_on(start: ModuleType, tmp_path: Path) -> None:
    """A complete environment, with a pytest that says how it was called."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    pytest_of_it = folder / "bin" / "pytest"
    pytest_of_it.write_text('#!/bin/sh\necho "$(pwd): $@"; echo "${PATH%%:*} $VIRTUAL_ENV"; exit 5\n')
    pytest_of_it.chmod(0o755)
    stamp = {"python": sys.version, "place": str(folder), "digest": start.source_digest(), "extras": "test cuda zig"}
    start.write_stamp(folder, stamp)
    tools = tmp_path / "tools"  # PATH without apt-get: nothing is installed on this machine
    tools.mkdir()
    (tools / "sh").symlink_to(str(shutil.which("sh")))
    began = time.perf_counter()
    done = call("--environment", folder, "test", "tests/formats", "-q", "-k", "a or b", PATH=str(tools), CI="")
    assert time.perf_counter() - began < 2
    assert done.returncode == 5, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"{ROOT}: tests/formats -q -k a or b", f"{folder}/bin {folder}"]
    assert "apt-get install g++ cmake" in done.stdout  # what will be skipped, and what would change that
    said = one_message(call("--environment", folder, "test", PATH=str(tools), CI="true"))
    assert "in CI no test is skipped" in said


def test_the_pinned_pip_is_a_wheel_with_a_digest(start: ModuleType) -> None:
    assert re.fullmatch(r"pip-[\d.]+-py3-none-any\.whl", start.PIP_WHEEL)
    assert len(bytes.fromhex(start.PIP_SHA256)) == hashlib.sha256().digest_size


def test_a_pip_that_is_missing_or_changed_is_refused(
    start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"https://a/pip/": b"<html></html>", f"https://a/{start.PIP_WHEEL}": b"another"}
    monkeypatch.setattr(start, "fetch", lambda url, cert: pages[url])
    settings = {"index-url": "https://a", "cert": ""}
    with pytest.raises(start.Failure, match=f"has no {re.escape(start.PIP_WHEEL)}"):
        start.download_pip(tmp_path, settings)
    pages["https://a/pip/"] = f'<a href="../{start.PIP_WHEEL}#sha256=00">'.encode()
    with pytest.raises(start.Failure, match="not the released file"):
        start.download_pip(tmp_path, settings)
