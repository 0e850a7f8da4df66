"""Read pictures and sounds from rows: parquet files, or a data set of the Hugging Face hub."""

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
    for row in _named(spec, field, info):
        if most is not None and len(pictures) == most:
            break
        if field not in row:
            raise UsageError(f"{source}: no pictures in field {field!r}; the fields are {', '.join(row)}: set `field`")
        name = pictures.name(len(pictures))
        pictures.append(encoded_bytes(row[field], name))
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


def encoded_bytes(value: Any, name: str) -> bytes:
    """Return the bytes of a picture or a sound as Hugging Face data sets keep them: a struct with ``bytes``, or alone.

    Raises:
        UsageError: it is neither.
    """
    found = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(found, bytes):
        raise UsageError(f"{name}: holds no bytes of a file, but {found!r:.40}; name the right column with `field`")
    return found


def _named(spec: DataSource, field: str, info: ModelInfo) -> Iterator[Mapping[str, Any]]:
    """Yield rows; labels are names where both the data set and the model have some in common, else as they are."""
    from datasets import ClassLabel

    for row, features in stream_rows(spec, field):
        classes, label = features.get(spec.label), row.get(spec.label)
        if isinstance(classes, ClassLabel) and isinstance(label, int) and knows_some(classes.names, info):
            yield {**row, spec.label: classes.int2str(label)}
        else:
            yield row


def stream_rows(spec: DataSource, field: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield rows of parquet files or of a data set of the hub, with the set's features; no cache is written.

    Args:
        field: the column of pictures or sounds, which stay encoded.
    Raises:
        UsageError: the source cannot be read.
    """
    from datasets import Audio, Image, load_dataset
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
            for kind in (Image, Audio):
                if isinstance(features.get(field), kind):
                    rows = rows.cast_column(field, kind(decode=False))
            for row in rows:
                yield row, features
    except CompressorError:
        raise
    except (DatasetNotFoundError, OSError, ValueError, UnicodeError) as error:
        raise UsageError(f"{source_label(spec)}: cannot be read as {spec.kind}: {first_line(error)}") from error
