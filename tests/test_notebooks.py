"""The notebooks of docs/notebooks, their code cells executed in one namespace each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

FOLDER = Path(__file__).resolve().parents[1] / "docs/notebooks"
SAYS = {
    "compress": ("nearest: ignore", "decode_tokens_per_s", "at 95% confidence", "of the bytes", "- Roofline"),
    "own_pass": ("relative error 0.0",),
}


def cells(path: Path) -> list[tuple[str, list[str]]]:
    """Return the code cells, each with its tags."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    found = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in found)  # nothing of one machine
    return [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in found]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], require_tool: Any
) -> None:
    """Each cell runs as it stands, but the first: the shipped model takes minutes, a tiny one is its stand-in."""
    require_tool("g++")
    monkeypatch.chdir(tmp_path)
    given = {"output": str(tmp_path / "out")}
    if path.stem == "compress":
        text = Path(pytest.__file__).read_text(encoding="utf-8")
        given |= {"model": str(save_model(tmp_path / "model", text)), "tokens": 128}  # type: ignore[dict-item]
    space: dict[str, Any] = {}
    for source, tags in cells(path):
        exec(compile(source, str(path), "exec"), space)
        if "parameters" in tags:
            assert given.keys() <= space.keys()
            space.update(given)
    said = capsys.readouterr().out
    assert all(words in said for words in SAYS[path.stem]), said
    assert (tmp_path / "out" / "manifest.json").is_file()
