"""A scratch copy of this repository, in which an exercise adds what a newcomer would, and counts the files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_caches import with_prices


class Scratch:
    """A copy of the sources under git, whose package is the one that its processes import."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = self._git("ls-files", "-co", "--exclude-standard", at=root).splitlines()
        for name in listed:
            if (root / name).is_file():  # not one that is about to be removed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, folder / name)
        self._git("init", "-q")
        self._git("add", "-A")
        self._git("-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q", "-m", "before")

    def write(self, name: str, text: str) -> None:
        """Add a file, or replace one."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace what stands once in a file."""
        text = (self.folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name}: {old!r} stands there {text.count(old)} times"
        self.write(name, text.replace(old, new))

    def changed(self) -> list[str]:
        """Names of the files that `git diff --stat` lists."""
        self._git("add", "-A")
        lines = self._git("diff", "--cached", "--stat=200", "HEAD").splitlines()
        return [line.split("|")[0].strip() for line in lines[:-1]]

    def python(self, *arguments: str) -> str:
        """Run Python in the copy, with the copy's package; its output."""
        paths = f"{self.folder}{os.pathsep}{self.folder / 'export' / 'python'}"
        cache = with_prices(self.folder.parent / "cache")
        environment = {**os.environ, "PYTHONPATH": paths, "COMPRESS_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def compress(self, *arguments: str) -> str:
        """Run the command in the copy; its output."""
        return self.python("-c", "from compressor.cli.commands import main; main()", *arguments)

    def _git(self, *arguments: str, at: Path | None = None) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=at or self.folder, capture_output=True, text=True, check=True
        ).stdout


@pytest.fixture
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Scratch:
    """Make the copy; skipped where the tests do not lie in a clone."""
    root = request.config.rootpath
    if not (root / ".git").exists() or shutil.which("git") is None:
        if os.environ.get("CI"):
            pytest.fail("the exercises need git and a clone; CI runs every test", pytrace=False)
        pytest.skip("needs git, and a clone")
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Scratch(root, folder)
