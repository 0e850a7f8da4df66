"""What several tests need from their surroundings: outside tools, and data that is not in the repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests neither use nor change the user's database of schedules."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("COMPRESS_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], Path]:
    """``require_tool("g++")`` is the tool's path; without it the test is skipped, and in CI it fails."""

    def require(name: str) -> Path:
        found = shutil.which(name)
        if found is None:
            reason = f"{name} is not on PATH"
            if os.environ.get("CI"):
                pytest.fail(f"{reason}; CI runs every test: install it in .ci/run", pytrace=False)
            pytest.skip(reason)
        return Path(found)

    return require


@pytest.fixture(scope="session")
def shared_data(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """``shared_data("models/x")`` is a path in ``../shared/data`` beside the checkout; absent, the test is skipped."""

    def find(relative: str) -> Path:
        path = request.config.rootpath.parent / "shared" / "data" / relative
        if not path.exists():
            pytest.skip(f"../shared/data/{relative} is not here")
        return path

    return find
