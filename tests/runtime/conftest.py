"""A bundle of the tiny language model, written as export writes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_bundle import TinyLanguageModel, write_tiny_bundle

from compressor.runtime import Bundle, load


@pytest.fixture(scope="session")
def model() -> TinyLanguageModel:
    return TinyLanguageModel()


@pytest.fixture(scope="session")
def bundle_folder(
    tmp_path_factory: pytest.TempPathFactory, model: TinyLanguageModel, require_tool: Callable[[str], Path]
) -> Path:
    require_tool("g++")
    return write_tiny_bundle(tmp_path_factory.mktemp("tiny"), model)


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return load(bundle_folder, threads=1)


@pytest.fixture
def copy(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "copy"))
