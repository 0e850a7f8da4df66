from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.errors import CompressorError, GateError, RecipeError, UsageError, VerificationError
from compressor.host.resources import PACKAGE, resource


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("recipes", "quickstart.yaml"),
        ("calibration", "python_docs.txt"),
        ("calibration", "python_docs_heldout.yaml"),
        ("models", "reference/config.json"),
        ("export", "python/compressor_runtime/__init__.py"),
    ],
)
def test_the_data_is_there(kind: str, file: str) -> None:
    assert (resource(kind) / file).is_file()


def _copy(folder: Path) -> Path:
    """Copy what a lookup needs, as an installation would lay it out."""
    package = folder / "compressor"
    (package / "host").mkdir(parents=True)
    for name in ("__init__.py", "version.py", "errors.py", "host/__init__.py", "host/resources.py"):
        shutil.copy(PACKAGE / name, package / name)
    return package


def _lookup(folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom compressor.host.resources import PACKAGE, resource\n"
    code += "print(resource('recipes'))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_wheel_carries_the_data_inside_the_package(tmp_path: Path) -> None:
    data = _copy(tmp_path) / "_data" / "recipes"
    data.mkdir(parents=True)
    assert _lookup(tmp_path).stdout.strip() == str(data.resolve())


def test_a_checkout_has_the_data_beside_the_package(tmp_path: Path) -> None:
    _copy(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert _lookup(tmp_path).stdout.strip() == str((tmp_path / "recipes").resolve())


def test_a_stranger_s_folder_beside_an_installation_is_not_taken_for_ours(tmp_path: Path) -> None:
    _copy(tmp_path)
    (tmp_path / "recipes").mkdir()  # as another package's folder in site-packages would be
    done = _lookup(tmp_path)
    assert done.returncode != 0
    assert "install compressor again" in done.stderr


def test_exit_codes() -> None:
    codes = {kind: kind.exit_code for kind in (CompressorError, UsageError, RecipeError, GateError, VerificationError)}
    assert list(codes.values()) == [1, 2, 2, 3, 4]
