"""Folders that vanish with their process, also when it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.host.cache import partial_folder, sweep

HOLD = """
import sys, time
from pathlib import Path
from compressor.host.cache import partial_folder
with partial_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def holder(parent: Path, name: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(parent), name], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_a_partial_folder_vanishes_unless_it_is_renamed(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "deep", "a") as folder:
        assert folder.is_dir() and folder.parent == tmp_path / "deep"
    with partial_folder(tmp_path / "deep", "a") as folder:
        (folder / "x").write_text("x")
        folder.rename(tmp_path / "deep" / "kept")
    with pytest.raises(KeyboardInterrupt), partial_folder(tmp_path / "deep", "a") as folder:
        raise KeyboardInterrupt
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["kept"]


@pytest.mark.parametrize("name", ["bundle", "odd [name] *"])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path, name: str) -> None:
    living, other = holder(tmp_path, name), holder(tmp_path, "another")
    killed = holder(tmp_path, name)
    try:
        assert len(list(tmp_path.iterdir())) == 3
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 3
        sweep(tmp_path, name)
        assert len(list(tmp_path.iterdir())) == 2
        living.send_signal(signal.SIGKILL)
        living.wait()
        with partial_folder(tmp_path, name) as folder:  # sweeps, too
            assert sorted(p.name.split(".")[1] for p in tmp_path.iterdir()) == sorted([name, "another"])
            assert not list(folder.iterdir())
    finally:
        for child in (living, other, killed):
            child.kill()
            child.wait()
