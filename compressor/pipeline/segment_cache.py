"""Content-addressed cache of finished segments.

An entry holds what a pass made of the linears between two cuts of the graph.  Its key is a digest of everything that
determines it: model, code, versions, earlier passes, options, samples.  So a run that was killed resumes where it
stopped, and a changed recipe reuses the segments that its change does not affect.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import failed_write
from compressor.host.cache import cache_folder, partial_folder, sweep

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS, _ENTRY = "weights.safetensors", "entry.json"
_NAME = "block"  # prefix of folders that are being filled


@dataclass(frozen=True)
class Block:
    """A cached segment: packed tensors, mapped from the file, and the records of its sites."""

    tensors: Mapping[str, Tensor]
    records: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """Description of a cached segment, as ``compress cache list`` shows it."""

    key: str
    label: str  # model and pass
    size_bytes: int
    used: float  # seconds since the epoch


class SegmentCache:
    """Segments on disk.  Several runs may share the folder: an entry appears whole and never changes."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "results"

    def prepare(self) -> None:
        """Check early that the folder can be written to, and remove leftovers of killed runs.

        Raises:
            CompressorError: the folder cannot be written to.
        """
        with self._explaining(), partial_folder(self.folder, _NAME):
            pass

    def load(self, key: str) -> Block | None:
        """Return the segment of that key, or None if there is none; remove it if its files are damaged."""
        from compressor.host.digests import read_sha256
        from compressor.host.tensor_files import map_safetensors

        folder = self.folder / key
        try:
            entry = json.loads((folder / _ENTRY).read_bytes())
            if read_sha256(folder / _WEIGHTS) != entry["sha256"]:
                raise ValueError("the hash differs")
            block = Block(map_safetensors(folder / _WEIGHTS), entry["records"])
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # pruning goes by the time of the last use
        return block

    def save(self, key: str, label: str, tensors: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]) -> Block:
        """Store a segment, and return it mapped from the file, so that the given tensors can be freed.

        Raises:
            CompressorError: there is no room, or the folder cannot be written to; nothing is left behind.
        """
        from compressor.host.tensor_files import map_safetensors, write_safetensors

        with self._explaining(), partial_folder(self.folder, _NAME) as partial:
            sha256 = write_safetensors(partial / _WEIGHTS, tensors)
            entry = {"label": label, "sha256": sha256, "records": list(records)}
            (partial / _ENTRY).write_text(json.dumps(entry, indent=1), encoding="utf-8")
            for file in (partial / _WEIGHTS, partial / _ENTRY):
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            mapped = map_safetensors(partial / _WEIGHTS)
            try:
                partial.rename(self.folder / key)
            except OSError:
                if not self._has(key):  # otherwise another run has stored it meanwhile
                    raise
        return Block(mapped, records)

    def remove(self, key: str) -> None:
        """Remove an entry that nothing needs any more, if it is there."""
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def _has(self, key: str) -> bool:
        return (self.folder / key / _ENTRY).is_file()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failed_write(
                error,
                f"{self.folder}: the cache cannot be written: {error}; free some space (`compress cache prune`), or "
                "set COMPRESS_CACHE_DIR to a folder that can",
            ) from error

    def entries(self) -> list[Entry]:
        """List the entries, the most recently used first."""
        found = []
        for folder in self.folder.glob("[0-9a-f]*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                label = str(json.loads((folder / _ENTRY).read_bytes())["label"])
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
                found.append(Entry(folder.name, label, size_bytes, folder.stat().st_mtime))
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def prune(self, older_than_days: float = 0.0) -> list[Entry]:
        """Remove segments last used at least that many days ago, and leftovers of killed runs; return the removed
        entries.

        Runs that use a segment at this moment have it mapped, and keep it.
        """
        sweep(self.folder, _NAME)
        limit = time.time() - older_than_days * 86400
        removed = [entry for entry in self.entries() if entry.used <= limit]
        for entry in removed:
            shutil.rmtree(self.folder / entry.key, ignore_errors=True)
        return removed
