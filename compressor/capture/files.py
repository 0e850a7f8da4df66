"""Read the JSON files of a model folder, with limits, before anything is built or opened that they name.

A configuration of a few bytes can ask for a million layers, and an index can name any file of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressor.errors import CaptureError, UsageError
from compressor.host.json_files import read_object

_LONGEST_NAME_BYTES = 255
_MOST_LAYERS, _MOST_POSITIONS, _MOST = 512, 1 << 24, 1 << 20


def listed_files(index: Path) -> list[Path]:
    """Return the safetensors files that an index names, all of them beside it.

    Raises:
        CaptureError: it is not an index, or names anything else.
    """
    try:
        weight_map = read_object(index).get("weight_map")
    except CaptureError as error:
        raise CaptureError(f"{index}: not a safetensors index: {error}") from error
    if not isinstance(weight_map, dict):
        raise CaptureError(f"{index}: not a safetensors index (no `weight_map`); fetch the file again")
    for file in weight_map.values():
        named = isinstance(file, str) and file.isprintable() and file == Path(file).name
        if not named or not file.endswith(".safetensors") or len(file.encode()) > _LONGEST_NAME_BYTES:
            raise CaptureError(
                f"{index}: not a safetensors index: {file!r:.80} is not a safetensors file beside it; do not "
                "trust this folder"
            )
    return [index.parent / file for file in sorted(set(weight_map.values()))]


def check_config(file: Path, stored_tensors: int) -> None:
    """Check that building the model that a config.json describes takes no more than a real one could.

    Counts of layers are held against the number of stored tensors, of which a layer has at least one (models whose
    layers share their weights have fewer, and up to 512 layers).

    Raises:
        CaptureError: it is no JSON object, or a count is absurd.
    """
    check_counts(read_object(file), file, stored_tensors)


def check_counts(config: dict[str, Any], file: Path, stored_tensors: int) -> None:
    """Check the counts of a configuration that a file states, as :func:`check_config` does.

    Raises:
        CaptureError: a count is absurd.
    """
    for key, number in _numbers(config):
        limit = _MOST if key.startswith(("n_", "num_")) else 1 << 63
        if "position" in key:
            limit = _MOST_POSITIONS
        elif "layer" in key:
            limit = max(_MOST_LAYERS, stored_tensors)
        if number > limit:
            raise CaptureError(
                f"{file}: cannot be used ({key} is {number}, more than {limit}; {stored_tensors} tensors are stored); "
                "fetch it again"
            )


def _numbers(value: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield all whole numbers under a key, at any depth."""
    left: list[Any] = [value]
    while left:
        current = left.pop()
        if isinstance(current, list):
            left.extend(current)
        elif isinstance(current, dict):
            left.extend(current.values())
            yield from ((key, number) for key, number in current.items() if type(number) is int)


def check_path(model: str | Path) -> None:
    """Raise a UsageError where the system cannot be asked about a path: too long, a home that nobody has, no right."""
    try:
        Path(model).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"model: {str(model)!r:.80}: no path that can be looked up ({reason})") from error
