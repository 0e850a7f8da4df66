"""Read recipe files as data: merge a recipe over the one that it extends, and insert the data sets that it names."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import RecipeError
from compressor.host.resources import Kind, resource
from compressor.recipe.located_yaml import LARGEST_BYTES, KeyPath, Origin, Source, nearest, parse

DATA_KEYS = ("calibration", "evaluation")
SOURCE_KEYS = ("text", "json", "parquet", "hub", "images", "audio")
SOUND_TABLES = ("metadata.csv", "metadata.jsonl")
"""Names of the table in a folder of sounds, as the library datasets has them."""
ARCHIVE_SUFFIX, ONNX_SUFFIX = ".pt2", ".onnx"
"""File names of programs that torch.export.save wrote, and of ONNX models."""
_PACKAGE = "package:"
_LONGEST_CHAIN = 16
_UNUSED_KEYS = {
    "calibration": ("tokens", "window", "stride", "limit"),
    "evaluation": ("samples", "sequence_length", "seed"),
}


def is_model_file(name: str) -> bool:
    """Return whether a name is one of a file that is a model of itself."""
    return name.lower().endswith((ARCHIVE_SUFFIX, ONNX_SUFFIX))


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def find_shipped(kind: Kind, name: str) -> Path | None:
    """Return the shipped YAML file of that name, or None."""
    return {path.stem: path for path in resource(kind).glob("*.yaml")}.get(name)


def package_folder(source: Source, name: str) -> Path | None:
    """Return the folder that ``package:<package>/<folder>`` of a ``model`` names, or None for other names.

    The installed Python package is located, not imported: none of its code runs.

    Raises:
        RecipeError: there is no such package, or no such folder in it.
    """
    if not name.startswith(_PACKAGE):
        return None
    package, _, inner = name.removeprefix(_PACKAGE).partition("/")
    if not re.fullmatch(r"[^\W\d]\w*", package):
        raise source.error(("model",), f"{name!r} names no Python package; write {_PACKAGE}NAME/FOLDER")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a running script, such as __main__
        spec = None
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    if not roots:
        why = f"no Python package {package!r} is installed; install the one that brings it, with pip"
        raise source.error(("model",), f"{name!r}: {why}")
    folder = next((root / inner for root in roots if is_dir(root / inner)), None)
    if folder is None:
        looked = " and ".join(map(str, roots))
        raise source.error(("model",), f"{name!r}: the package has no folder {inner!r}; looked in {looked}")
    return folder


def is_dir(path: Path) -> bool:
    """Return whether a path is a folder; False also for names that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def shipped_names(kind: Kind) -> list[str]:
    """Return the names of the shipped recipes or calibration sets."""
    return sorted(path.stem for path in resource(kind).glob("*.yaml"))


def read_recipe(path: Path, seen: Sequence[Path] = ()) -> Source:
    """Read a recipe file, the recipes that it extends, and the data sets that it names.

    Raises:
        RecipeError: a file is missing or is not a recipe's YAML; recipes extend one another in a circle or in a long
            chain; ``output`` leads out of the current folder.
    """
    source = _read(path)
    _check_output(source)
    expand_data(source)
    if source.data.get("extends") is None:
        source.data.pop("extends", None)
        return source
    seen = [*seen, path.resolve()]
    name = source.data.pop("extends")
    origin = source.origin(("extends",))
    if not isinstance(name, str):
        raise source.error(("extends",), f"{name!r} is not the path or the name of a recipe")
    written = origin.folder / name
    base = written if is_file(written) else find_shipped("recipes", name)
    if base is None:
        why = f"no recipe at {str(written)!r}, and none of that name is shipped"
        raise source.error(("extends",), f"{why}; {nearest(name, shipped_names('recipes'), 'compress list recipes')}")
    if base.resolve() in seen:
        circle = " -> ".join(str(step) for step in [*seen, base.resolve()])
        raise source.error(("extends",), f"recipes extend one another in a circle: {circle}; remove one `extends:`")
    if len(seen) > _LONGEST_CHAIN:
        raise source.error(("extends",), f"more than {_LONGEST_CHAIN} recipes extend one another; merge some")
    return _merge(read_recipe(base, seen), source)


def _check_output(source: Source) -> None:
    """Refuse an ``output`` outside the current folder: recipe files may be other people's; the command line is not
    limited.
    """
    output = source.data.get("output")
    if isinstance(output, str) and (Path(output).is_absolute() or ".." in Path(output).parts):
        why = "leads out of the current folder, which a recipe file may not write to"
        raise source.error(("output",), f"{output!r:.80} {why}; give that folder with --output")


def expand_data(source: Source) -> None:
    """Replace the name (or path) of a data set under ``calibration`` and ``evaluation`` by its content."""
    for key in DATA_KEYS:
        name = source.data.get(key)
        if not isinstance(name, str):
            continue
        origin = source.origin((key,))
        if name.endswith((".yaml", ".yml")):
            places = dict.fromkeys([origin.folder / name, Path(name)])
            path = next((place for place in places if is_file(place)), None)
            why = f"no file at {' or '.join(repr(str(place)) for place in places)}"
        else:
            path = find_shipped("calibration", name)
            why = f"no data set {name!r} is shipped; {nearest(name, shipped_names('calibration'))}"
        if path is None:
            raise source.error((key,), f"{why}; files are given as `{key}: {{text: FILE}}`")
        data_set = _read(path)
        data_set.data.setdefault("name", path.stem)
        for unused in _UNUSED_KEYS[key]:  # a set may have options for both purposes
            data_set.data.pop(unused, None)
        source.graft((key,), data_set.data, data_set)
        source.origins[key,] = origin


def _read(path: Path) -> Source:
    if not is_file(path):
        raise RecipeError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text; save it as UTF-8") from error
    return parse(text, Origin(str(path), 1, path.parent))


def _merge(base: Source, child: Source) -> Source:
    """Merge ``child`` over ``base``: mappings key by key, lists and scalars as a whole."""
    merged = Source(base.data, base.origins)
    merged.origins[()] = child.origins[()]
    _merge_into(merged, (), child)
    return merged


def _merge_into(merged: Source, path: KeyPath, child: Source) -> None:
    below, above = _at(merged.data, path), _at(child.data, path)
    for key, value in above.items():
        here = (*path, key)
        # options of another target or source do not apply to the one that replaces it
        renamed = path == () and (
            key == "target" or (key in DATA_KEYS and isinstance(value, dict) and any(k in value for k in SOURCE_KEYS))
        )
        if isinstance(value, dict) and isinstance(below.get(key), dict) and not renamed:
            _merge_into(merged, here, child)
        else:
            merged.graft(here, value, child, here)


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data
