"""Read pictures from rows: parquet files, or a data set of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compressor.data.labels import class_numbers, knows_some
from compressor.data.pictures import EncodedRows
from compressor.data.text import source_label
from compressor.errors import CompressorError, UsageError, first_line
from compressor.graph.model import ModelInfo

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource


def read_rows(spec: DataSource, info: ModelInfo, most: int | None) -> tuple[EncodedRows, Tensor | None]:
    """Read rows as they are streamed; pictures stay encoded, in a temporary file.

    Args:
        spec: with ``field``, the column of pictures (``image`` unless given), and ``label``, that of their classes.
        info: of the model, whose classes names are looked up in.
        most: rows to read; None reads all.
    Returns:
        Pictures and labels int64 [n]; None where there is no column of labels.
    Raises:
        UsageError: the source cannot be read, or its columns are not of pictures and classes.
    """
    source = source_label(spec)
    field = spec.field if spec.changes("field") else "image"
    pictures, labels = EncodedRows(source), list[Any]()
    for row in _rows(spec, field, info):
        if most is not None and len(pictures) == most:
            break
        if field not in row:
            raise UsageError(f"{source}: no pictures in field {field!r}; the fields are {', '.join(row)}: set `field`")
        name = pictures.name(len(pictures))
        pictures.append(_encoded(row[field], name))
        if row.get(spec.label) is None:
            if labels or spec.changes("label"):
                raise UsageError(f"{name}: no label in {spec.label!r}; the fields are {', '.join(row)}: set `label`")
            continue
        labels.append(row[spec.label])
        if len(labels) != len(pictures) or type(labels[-1]) is not type(labels[0]):
            raise UsageError(f"{name}: only some of the rows up to here have a label of one type; correct the data")
    if not labels:
        return pictures, None
    if isinstance(labels[0], str):
        return pictures, class_numbers(labels, info, source)
    if type(labels[0]) is not int:
        raise UsageError(f"{source}: {spec.label!r} holds {labels[0]!r:.40}; wanted: a class's number or name")
    return pictures, torch.tensor(labels, dtype=torch.int64)


def _encoded(value: Any, name: str) -> bytes:
    """Return the bytes of a picture, as Hugging Face data sets keep them: a struct with ``bytes``, or bytes alone."""
    found = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(found, bytes):
        raise UsageError(f"{name}: holds no picture's bytes, but {found!r:.40}; name their column with `field`")
    return found


def _rows(spec: DataSource, field: str, info: ModelInfo) -> Iterator[Mapping[str, Any]]:
    """Yield rows with their pictures encoded, streamed so that no cache is written.

    Labels are names where both the data set and the model have some in common, else as they are.
    """
    from datasets import ClassLabel, Image, load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        with TemporaryDirectory() as scratch:  # for a lock file that would otherwise stay in the user's cache
            options = {"streaming": True, "cache_dir": scratch}
            if spec.kind == "hub":
                rows = load_dataset(str(spec.hub), spec.config, split=spec.split, **options)
            else:
                files = [str(path) for path in spec.find_files()]
                rows = load_dataset(str(spec.kind), data_files=files, split="train", **options)
            features = rows.features or {}
            if isinstance(features.get(field), Image):
                rows = rows.cast_column(field, Image(decode=False))
            classes: Any = features.get(spec.label)
            named = isinstance(classes, ClassLabel) and knows_some(classes.names, info)
            for row in rows:
                label = row.get(spec.label)
                yield {**row, spec.label: classes.int2str(label)} if named and isinstance(label, int) else row
    except CompressorError:
        raise
    except (DatasetNotFoundError, OSError, ValueError, UnicodeError) as error:
        raise UsageError(f"{source_label(spec)}: cannot be read as {spec.kind}: {first_line(error)}") from error
