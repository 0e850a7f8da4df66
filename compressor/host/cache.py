"""The cache folder, its files of entries, and folders that vanish with the process that fills them.

Whatever a run leaves half-written, however it ended, is told from what another run is writing at this moment by a
lock that the operating system drops with its process: the next run that comes by removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """``COMPRESS_CACHE_DIR``, else ``compressor`` in the user's cache folder."""
    if named := os.environ.get("COMPRESS_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compressor"


@contextmanager
def partial_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a folder ``.<name>.<random>.partial`` in ``parent``; remove it at the block's end unless it was renamed.

    First remove leftovers of the same name whose process has died.

    Raises:
        OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent, name)
    folder, lock = _make_locked(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path, name: str) -> None:
    """Remove the partial folders of this name whose process has died."""
    for folder in parent.glob(f".{glob.escape(name)}.*.partial"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone, or not ours to look into
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # being written
        finally:
            os.close(lock)


def _make_locked(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        folder = parent / f".{name}.{secrets.token_hex(4)}.partial"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except FileNotFoundError:
            continue
        if folder.exists() and folder.stat().st_ino == os.fstat(lock).st_ino:
            return folder, lock
        os.close(lock)  # somebody's sweep came between the two steps


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file of the cache, by name; none if it is missing or not valid."""
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def merge_entries(file: Path, entries: Mapping[str, Any], keep: Callable[[str], bool] = lambda _name: True) -> None:
    """Add entries to a JSON file of the cache, which other processes may be adding to; it is replaced in one step.

    Args:
        keep: which of the names that are there stay.
    Raises:
        OSError: it cannot be written; it is as it was, and nothing is left beside it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two writers at once lose an entry
            fcntl.flock(folder, fcntl.LOCK_EX)
            for left in file.parent.glob(f".{glob.escape(file.name)}.*.partial"):
                left.unlink()  # by a process that was killed: the others wait for the lock
        kept = {name: entry for name, entry in read_entries(file).items() if keep(name)}
        beside.write_text(json.dumps({**kept, **entries}, indent=1, sort_keys=True), encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
        os.close(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all: its bytes are on the disk before it gets its name.

    Raises:
        OSError: it cannot be written; what was there is as it was, and nothing is left beside it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
