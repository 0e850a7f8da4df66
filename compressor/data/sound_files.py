"""Find sounds and their texts: a folder of WAV files with a table, rows of parquet files, a data set of the hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from compressor.data.pictures import Encoded, EncodedFiles, EncodedRows
from compressor.data.rows import encoded_bytes, stream_rows
from compressor.data.text import source_label
from compressor.errors import UsageError
from compressor.recipe.sources import SOUND_TABLES

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource

_NAME, _SOUND = "file_name", "audio"  # columns of a table, and of rows


def find_sounds(spec: DataSource, most: int | None) -> tuple[Encoded, list[str]]:
    """Return sounds, encoded, and the text of each.

    Args:
        spec: with ``field``, the column of texts.
        most: sounds to take, the first ones; None takes all.
    Raises:
        UsageError: the table or the columns are not of sounds and texts.
    """
    if spec.kind != "audio":
        return _rows(spec, most)
    label, paths = source_label(spec), spec.find_files()
    if len(paths) != 1 or not paths[0].is_dir():
        raise UsageError(
            f"{label}: give one folder, with WAV files and a table of their texts ({' or '.join(SOUND_TABLES)})"
        )
    return _folder(paths[0], spec.field, most)


def _folder(folder: Path, field: str, most: int | None) -> tuple[EncodedFiles, list[str]]:
    tables = [folder / name for name in SOUND_TABLES if (folder / name).is_file()]
    if len(tables) != 1:
        found = "has both" if tables else "has none"
        raise UsageError(
            f"{folder}: wanted is one table of sounds and texts, {' or '.join(SOUND_TABLES)}, and it {found}"
        )
    files, texts = list[Path](), list[str]()
    for where, row in _table(tables[0]):
        for column in (_NAME, field):
            if not isinstance(row.get(column), str):
                raise UsageError(
                    f"{where}: no text in column {column!r}; the columns are {', '.join(map(str, row))}"
                    + ("" if column == _NAME else ": set `field` to that of the texts")
                )
        inner = PurePosixPath(row[_NAME])
        if inner.is_absolute() or ".." in inner.parts or inner.suffix.lower() != ".wav":
            raise UsageError(f"{where}: {row[_NAME]!r:.80} is not a WAV file (.wav) in this folder; convert or move it")
        if not (folder / inner).is_file():
            raise UsageError(f"{where}: {folder / inner} is missing; correct the table")
        files.append(folder / inner)
        texts.append(row[field])
    unlisted = sorted({path for path in folder.rglob("*") if path.suffix.lower() == ".wav"}.difference(files))
    if unlisted:
        raise UsageError(f"{unlisted[0]}: {tables[0].name} does not list it; add its text, or remove the file")
    return EncodedFiles(tuple(files[:most])), texts[:most]


def _table(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a table, each with its place for messages."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{file}: cannot be read as UTF-8 text ({error}); correct the file") from error
    if file.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(io.StringIO(content, newline="")), 2):
            yield f"{file}, row {number}", row
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{file}:{number}: not JSON ({error}); give an object in each line") from error
            if not isinstance(found, dict):
                raise UsageError(f"{file}:{number}: not an object with {_NAME!r} and a text; correct the line")
            yield f"{file}:{number}", found


def _rows(spec: DataSource, most: int | None) -> tuple[EncodedRows, list[str]]:
    source = source_label(spec)
    sounds, texts = EncodedRows(source), list[str]()
    for row, _ in stream_rows(spec, _SOUND):
        if most is not None and len(sounds) == most:
            break
        name = sounds.name(len(sounds))
        if row.get(_SOUND) is None or not isinstance(row.get(spec.field), str):
            missing = f"no sound in field {_SOUND!r}" if row.get(_SOUND) is None else f"no text in {spec.field!r}"
            raise UsageError(f"{name}: {missing}; the fields are {', '.join(row)}: set `field` to that of the texts")
        sounds.append(encoded_bytes(row[_SOUND], name))
        texts.append(row[spec.field])
    return sounds, texts
