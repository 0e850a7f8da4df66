"""Adding a target takes two files: one source, one test; the null target under another name is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.host.resources import PACKAGE

TEST = '''"""The target nowhere is in no list and is found."""

from compressor.codegen.backend import make_backend
from compressor.codegen.targets.nowhere import Nowhere
from compressor.registry import TARGETS


def test_it_is_found() -> None:
    assert TARGETS.find("nowhere") is Nowhere
    assert not make_backend(Nowhere()).runs_here
'''


def test_a_target_takes_a_source_and_a_test(scratch: Any, small_llama: Path, tmp_path: Path) -> None:
    null = (PACKAGE / "codegen" / "targets" / "null.py").read_text(encoding="utf-8")
    renamed = null.replace("null", "nowhere").replace("Null", "Nowhere").replace("NULL", "NOWHERE")
    scratch.write("compressor/codegen/targets/nowhere.py", renamed)
    scratch.write("tests/codegen/targets/test_nowhere.py", TEST)
    assert "nowhere" in scratch.compress("list", "targets")
    recipe = tmp_path / "recipe.yaml"
    passes = "passes:\n  - rtn: {scheme: W4A16_G32}\n"
    recipe.write_text(f"model: {small_llama}\n{passes}target: nowhere\n", encoding="utf-8")
    scratch.compress("run", str(recipe), "-o", str(tmp_path / "bundle"))
    assert (tmp_path / "bundle" / "manifest.json").is_file()
    scratch.python("-m", "pytest", "-q", "tests/codegen/targets/test_nowhere.py")
    assert sorted(scratch.changed()) == [
        "compressor/codegen/targets/nowhere.py",
        "tests/codegen/targets/test_nowhere.py",
    ]
