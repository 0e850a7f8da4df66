"""Writes bundles: manifest, kernels, weights, tokenizer, run-time.  A bundle appears whole or not at all."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compressor.errors import CompressorError, UsageError
from compressor.host.cache import partial_folder

_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE: two names swap what they name, in one step
_HERE = -100  # AT_FDCWD


@contextmanager
def publishing(destination: Path) -> Iterator[Path]:
    """Make a folder beside ``destination`` that takes its place when the block ends well, and vanishes otherwise.

    What the block wrote is on the disk before it gets its name.  A bundle that was there stays whole until then.
    """
    check_destination(destination)
    destination = destination.absolute()
    with ExitStack() as stack:
        with explaining_failed_writes(destination):
            partial = stack.enter_context(partial_folder(destination.parent, destination.name))
        yield partial
        with explaining_failed_writes(destination):
            for file in sorted(partial.rglob("*"), reverse=True):
                _flush(file)
            _flush(partial)
            _take_place(partial, destination)
            _flush(destination.parent)


@contextmanager
def explaining_failed_writes(destination: Path) -> Iterator[None]:
    """Errors of the system become one that says what to do."""
    try:
        yield
    except OSError as error:
        raise CompressorError(
            f"{destination}: cannot be written: {error}; free some space or choose another folder"
        ) from error


def check_destination(destination: Path) -> None:
    """Raise a UsageError unless a bundle can be written to ``destination``: for a check before hours of work."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(f"{destination}: is not a folder; choose another name for the bundle")
    if destination.is_dir() and any(destination.iterdir()) and not _is_bundle(destination):
        raise UsageError(f"{destination}: holds something else than a bundle; choose another name, or an empty folder")
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{destination}: cannot be written: {parent} is not a folder that you may write to")


def _is_bundle(folder: Path) -> bool:
    """Tell whether a folder holds a bundle, of whatever kind."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format")).startswith("compressor ")


def _take_place(partial: Path, destination: Path) -> None:
    """Rename a folder over another one; afterwards ``partial`` names what was there, if anything was."""
    if not destination.exists():
        partial.rename(destination)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(partial), _HERE, os.fsencode(destination), _EXCHANGE) == 0:
        return
    # A file system that cannot exchange names: between these two steps there is no bundle at the destination.
    former = partial.with_suffix(".former")
    destination.rename(former)
    try:
        partial.rename(destination)
    except OSError:
        former.rename(destination)
        raise
    former.rename(partial)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
