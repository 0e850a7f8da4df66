"""Keep object files of kernels on disk: one that was generated is there for the next candidate, run and bundle."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.host.cache import cache_folder, replace_file

_MOST_BYTES = 512 << 20
_LEFT = 0.75
"""Share of the most bytes that stays when there are more: those that were used last."""
_DIGITS = 32


@dataclass(frozen=True)
class Object:
    """A file of the store, and when it was last used, in seconds since the epoch."""

    path: Path
    size_bytes: int
    used: float


class ObjectStore:
    """Object files on disk, each under the digest of all that determines it, and of its own bytes.

    Several runs may share the folder: a file appears whole and never changes.  They lie in folders by the first two
    digits, as a kernel is looked for by its digest among all files of one.

    Args:
        folder: None takes the cache folder's.
        most_bytes: more than these are not kept.
    """

    def __init__(self, folder: Path | None = None, most_bytes: int = _MOST_BYTES) -> None:
        self.folder, self._most_bytes = folder or cache_folder() / "kernels", most_bytes

    def find(self, key: str) -> bytes | None:
        """Return the object of a key, None if there is none; a file that is damaged is removed."""
        for path in (self.folder / key[:2]).glob(f"{key}.*.o"):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if path == self._path(key, content):
                    os.utime(path)  # pruning goes by the time of the last use
                    return content
                path.unlink()
        return None

    def keep(self, key: str, content: bytes) -> None:
        """Store the object of a key.

        Raises:
            OSError: it cannot be written; nothing is left behind.
        """
        path = self._path(key, content)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)

    def trim(self) -> None:
        """Remove what was not used for longest, if there is more than is kept."""
        found = sorted(self.objects(), key=lambda one: one.used)
        total = sum(one.size_bytes for one in found)
        most = total if total <= self._most_bytes else _LEFT * self._most_bytes
        for one in found:
            if total <= most:
                break
            one.path.unlink(missing_ok=True)
            total -= one.size_bytes

    def prune(self, older_than_days: float = 0.0) -> list[Object]:
        """Remove what was last used at least that many days ago; return it."""
        limit = time.time() - older_than_days * 86400
        removed = [one for one in self.objects() if one.used <= limit]
        for one in removed:
            one.path.unlink(missing_ok=True)
        return removed

    def objects(self) -> Iterator[Object]:
        """List what is kept."""
        for path in self.folder.glob("*/*.o"):
            with contextlib.suppress(OSError):  # another run may remove it at this moment
                state = path.stat()
                yield Object(path, state.st_size, state.st_mtime)

    def _path(self, key: str, content: bytes) -> Path:
        return self.folder / key[:2] / f"{key}.{hashlib.sha256(content).hexdigest()[:_DIGITS]}.o"
