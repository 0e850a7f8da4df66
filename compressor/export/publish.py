"""Writes bundles: manifest, kernels, weights, tokenizer, run-time.  A bundle appears whole or not at all."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compressor.errors import UsageError, failed_write
from compressor.export.manifest import foreign_files
from compressor.host.cache import partial_folder

_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE: two names swap what they name, in one step
_HERE = -100  # AT_FDCWD
_SHOWN = 3


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
        check_destination(destination)  # hours may have passed
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
        advice = "free some space or choose another folder"
        raise failed_write(error, f"{destination}: cannot be written: {error}; {advice}") from error


def check_destination(destination: Path) -> None:
    """Raise a UsageError unless a bundle can be written to ``destination``: for a check before hours of work.

    A folder that is there must be empty, or hold a bundle and nothing else: its place is taken as a whole.
    """
    if "\0" in str(destination):  # which pathlib takes for a path that is not there
        raise UsageError(f"{str(destination)!r:.80}: no path may hold a NUL; choose another name for the bundle")
    try:
        destination.exists()
    except OSError as error:  # too long, or behind a folder that may not be entered
        raise UsageError(f"{str(destination)!r:.80}: no path for a bundle ({error.strerror}); take another") from error
    if destination.name in ("", ".."):
        raise UsageError(f"{destination}: the bundle takes the place of a folder; name one of its own")
    if destination.is_symlink():
        raise UsageError(
            f"{destination}: is a link to {destination.readlink()}; name the folder itself, or another one"
        )
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination}: is not a folder; choose another name for the bundle")
    if destination.is_dir() and any(destination.iterdir()):
        _check_replaceable(destination)
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{destination}: cannot be written: {parent} is not a folder that you may write to")


def is_program_file(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a program of torch.export, one file; else it is a Hugging Face folder."""
    return checkpoint.suffix == ".pt2"


@contextmanager
def publishing_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """Do for a checkpoint, a folder or a file, what :func:`publishing` does; yields where to write it."""
    if not is_program_file(checkpoint):
        with publishing(checkpoint) as folder:
            yield folder
        return
    with ExitStack() as stack:
        with explaining_failed_writes(checkpoint):
            checkpoint = checkpoint.absolute()
            partial = stack.enter_context(partial_folder(checkpoint.parent, checkpoint.name))
        yield partial / checkpoint.name
        with explaining_failed_writes(checkpoint):
            _flush(partial / checkpoint.name)
            (partial / checkpoint.name).replace(checkpoint)
            _flush(checkpoint.parent)


def check_apart(bundle: Path, checkpoint: Path) -> None:
    """Raise a UsageError unless a checkpoint can be written, and neither folder holds the other."""
    if not is_program_file(checkpoint):
        check_destination(checkpoint)
    elif checkpoint.is_dir() or checkpoint.is_symlink():
        raise UsageError(f"checkpoint: {checkpoint}: is there and not a file; choose another name")
    first, second = bundle.absolute(), checkpoint.absolute()
    if first == second or first in second.parents or second in first.parents:
        raise UsageError(f"checkpoint: {checkpoint} and the bundle, {bundle}, need folders apart; choose another")


def _check_replaceable(folder: Path) -> None:
    """Raise a UsageError unless a folder holds a bundle, of whatever kind, and no file that is not the bundle's."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not str(manifest.get("format")).startswith("compressor "):
        raise UsageError(f"{folder}: holds something else than a bundle; choose another name, or an empty folder")
    listed = manifest.get("files")
    foreign = foreign_files(folder, listed if isinstance(listed, dict) else ())
    if foreign:
        shown = ", ".join(foreign[:_SHOWN]) + (f" and {len(foreign) - _SHOWN} more" * (len(foreign) > _SHOWN))
        raise UsageError(f"{folder}: holds {shown} beside a bundle; move that away, or choose another name")


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
