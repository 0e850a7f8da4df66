"""Completion in a shell, through click's own API, and as bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, get_completion_class

from compressor.cli.commands import main

PROBE = """
import sys
from compressor.cli.commands import main
try:
    main(prog_name="compress")
finally:
    assert not {"torch", "tvm", "transformers"} & set(sys.modules)
"""


def completed(*words: str) -> list[str]:
    """Return what is offered for the last of the words."""
    complete = BashComplete(main, {}, "compress", "_COMPRESS_COMPLETE")
    return [item.value for item in complete.get_completions([*words[:-1]], words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["in"], ["init", "inspect"]),
        (["run", "quickstart_w"], ["quickstart_webgpu"]),
        (["plan", "quickstart", "--target", "w"], ["wasm", "webgpu"]),
        (["auto", "--target", "cu"], ["cuda"]),
        (["init", "--scheme", "NVF"], ["NVFP4", "NVFP4_ANVFP4"]),
        (["export", "bundle", "--to", "compressed"], ["compressed-tensors"]),
        (["show", "smoothquant_w8a8_s"], ["smoothquant_w8a8_static_x86"]),
        (["show", "squeeze"], ["squeezellm", "squeezellm_lut3_x86"]),
        (["list", "pl"], ["plugins"]),
        (["cache", "pr"], ["prune"]),
        (["export", "bundle", "--to", "nothing"], []),
    ],
)
def test_names_are_completed(words: list[str], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_recipes_in_the_folder_are_offered_and_else_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").touch()
    assert "quick.yaml" in completed("run", "quick") and "quickstart" in completed("run", "quick")
    (item,) = BashComplete(main, {}, "compress", "_COMPRESS_COMPLETE").get_completions(["run"], "folder/")
    assert (item.type, item.value) == ("file", "folder/")  # the shell's own completion


def test_bash_gets_its_answer_without_heavy_imports() -> None:
    asked = {"_COMPRESS_COMPLETE": "bash_complete", "COMP_WORDS": "compress run quickstart_a", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | asked, check=False)
    assert done.stdout == "plain,quickstart_arm\n" and "Assertion" not in done.stderr
    asked = {"_COMPRESS_COMPLETE": "bash_source"}
    source = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | asked, check=False)
    assert "complete -o nosort -F _compress_completion compress" in source.stdout


@pytest.mark.parametrize(
    ("shell", "words", "cursor", "answer", "source"),
    [
        ("zsh", "compress run quickstart_a", "2", "plain\nquickstart_arm\n_", "compdef _compress_completion compress"),
        ("fish", "compress run", "quickstart_a", "plain,quickstart_arm", "complete --no-files --command compress"),
    ],
)
def test_other_shells_get_theirs(
    shell: str, words: str, cursor: str, answer: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = get_completion_class(shell)
    assert found is not None
    complete = found(main, {}, "compress", "_COMPRESS_COMPLETE")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", cursor)
    assert complete.complete().strip() == answer and source in complete.source()
