"""List the files of a bundle in its manifest, and keep measurements beside it."""

from __future__ import annotations

import json
import marshal
import math
import os
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import MAGIC_NUMBER
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any

from compressor.errors import failed_write
from compressor.host.cache import replace_file

MEASUREMENTS = "measurements.json"
CARD, REPORT = "README.md", "report.html"
UNLISTED = ("manifest.json", "manifest.json.sig", MEASUREMENTS, CARD, REPORT)
"""Files that the manifest does not list: itself, its signature, and those with measured figures, which differ from run
to run."""


def write_measurements(bundle: Path, measurements: Mapping[str, Any]) -> None:
    """Write measured figures beside the manifest: they differ from run to run, so they stand outside the hashes."""
    try:
        replace_file(bundle / MEASUREMENTS, _json(measurements))
    except OSError as error:
        raise failed_write(error, f"{bundle}: measurements.json cannot be written: {error}") from error


def listing(folder: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return size, SHA-256 (taken from ``known`` where it has one) and pieces of every file that a manifest lists."""
    from compressor_runtime.check import PIECE_BYTES, sha256
    from compressor_runtime.cpu import available_cores

    listing: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(available_cores()) as pool:
        for file in (file for file in folder.rglob("*") if file.is_file()):
            name, size_bytes = file.relative_to(folder).as_posix(), file.stat().st_size
            if name in UNLISTED:
                continue
            listing[name] = {"bytes": size_bytes, "sha256": known.get(name) or sha256(file)}
            if size_bytes > PIECE_BYTES:
                starts = range(0, size_bytes, PIECE_BYTES)
                ends = (start + PIECE_BYTES for start in starts)
                listing[name]["pieces"] = list(pool.map(sha256, repeat(file), starts, ends))
    return listing


def with_total(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as JSON with ``bundle_bytes``: all files that it lists, and itself."""
    files_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    text, total = b"", -1
    while total != files_bytes + len(text):  # the number is part of the text that it counts
        total = files_bytes + len(text)
        text = _json({**manifest, "bundle_bytes": total})
    return text


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def foreign_files(bundle: Path, listed: Iterable[str]) -> list[str]:
    """Return what lies in a bundle's folder and is not the bundle's, in order; links are not followed.

    What Python compiled from a listed source, by an import as in the bundle's README, is the bundle's.
    """
    own, found = {*UNLISTED, *listed}, []
    for folder, folders, files in os.walk(bundle):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        found += [Path(folder, name).relative_to(bundle).as_posix() for name in (*files, *links)]
    return sorted(name for name in found if name not in own and not _is_compiled(bundle, PurePosixPath(name), own))


def _is_compiled(bundle: Path, name: PurePosixPath, own: Container[str]) -> bool:
    """Return whether a file is what this Python makes of a source of the bundle, and so does what the source does."""
    source = name.parent.parent / f"{name.name.partition('.')[0]}.py"
    if name.parent.name != "__pycache__" or name.suffix != ".pyc" or str(source) not in own:
        return False
    try:
        compiled = (bundle / name).read_bytes()
        expected = compile((bundle / source).read_bytes(), str(source), "exec", dont_inherit=True)
        return compiled[:4] == MAGIC_NUMBER and bool(marshal.loads(compiled[16:]) == expected)
    except (OSError, EOFError, ValueError, TypeError, SyntaxError):
        return False


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by text: "inf", "-inf", "nan"."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
