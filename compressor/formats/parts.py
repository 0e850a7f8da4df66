"""List what a packed weight is made of: the one description of each stored tensor.

Byte counts, parameters' names, the check of bundles, the operands that schedules are timed on and the bindings in
browsers all follow from :data:`PART_TABLE`.  A new part, such as a sparsity mask, is one more row, and what its kernels
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, TypeAlias, TypeVar

from compressor.formats.extras import ColumnBlocks, Extra, KeptOfGroup, OutlierFeatures, SingleZeros, SkippedInputs
from compressor.formats.planes import TwoPlanes

E = TypeVar("E", bound=Extra)
TILE_ROWS = 16
"""Rows whose words are interleaved."""
STEP = 64
"""Single codes that are packed, and columns that are masked, at once."""

Stored: TypeAlias = "tuple[str, tuple[int, ...]]"
"""Type, as numpy calls it, and shape."""

_BYTES = {"int32": 4, "float32": 4, "float16": 2, "int16": 2, "uint8": 1}
SAFETENSORS_TYPES = {"int32": "I32", "float32": "F32", "float16": "F16", "int16": "I16", "uint8": "U8"}
"""Names of the types in a safetensors header."""


class Layout(Protocol):
    """What parts ask of a format (:class:`compressor.formats.format.Format`)."""

    @property
    def symmetric(self) -> bool: ...  # noqa: D102

    @property
    def scale_type(self) -> Literal["F16", "E8M0", "E4M3"]: ...  # noqa: D102

    @property
    def codebook(self) -> bool: ...  # noqa: D102

    @property
    def has_input_scale(self) -> bool: ...  # noqa: D102

    @property
    def block_tiles(self) -> int: ...  # noqa: D102

    @property
    def chunk_words(self) -> int: ...  # noqa: D102

    @property
    def levels(self) -> int: ...  # noqa: D102

    @property
    def bits(self) -> int: ...  # noqa: D102

    def chunks(self, in_features: int) -> int: ...  # noqa: D102

    def groups(self, in_features: int) -> int: ...  # noqa: D102

    def outliers(self, out_features: int, in_features: int) -> int: ...  # noqa: D102

    def extra(self, kind: type[E]) -> E | None: ...  # noqa: D102


@dataclass(frozen=True)
class Part:
    """Describe one tensor of a packed weight.

    Attributes:
        name: a graph has it as the parameter ``<site>.<name>``.
        stored: (format, out_features, in_features) -> type and shape; None where the format does not have it.
        is_tiled: its first dimension is tiles of rows, or blocks of them: a piece of the weight has a piece of it.
        timing_fill: what it holds while schedules are timed: one number, or ``even``, offsets at equal distances.
    """

    name: str
    stored: Callable[[Layout, int, int], Stored | None]
    is_tiled: bool = False
    timing_fill: Literal[0, 1, 255, "even"] = 0


def panel_rows(out_features: int, bits: int) -> int:
    """Return the rows of a panel of skipped inputs: whole units of 16 bytes, at most 2048, as many as waste the least,
    two panels at least.
    """
    unit = 128 // bits
    units = -(-out_features // unit)
    largest = min(2048 // 16, max(1, units // 2))
    return unit * min(range(largest, (largest - 1) // 2, -1), key=lambda size: -units % size)


def _tiles(out_features: int) -> int:
    return -(-out_features // TILE_ROWS)


def _codes(fmt: Layout, rows: int, columns: int) -> Stored:
    if fmt.extra(SkippedInputs) is not None:
        panel = panel_rows(rows, fmt.bits)
        return "uint8", (-(-rows // panel), columns, panel * fmt.bits // 8)
    if (single := fmt.extra(SingleZeros)) is not None:  # and as many more as are loaded at once
        return "uint8", ((-(-single.kept(rows, columns) // STEP) + 1) * STEP * fmt.bits // 8,)
    words = fmt.chunk_words // (2 if fmt.extra(TwoPlanes) is not None else 1)
    return "int32", (_tiles(rows), fmt.chunks(columns), words, TILE_ROWS)


def _lower(fmt: Layout, rows: int, columns: int) -> Stored | None:
    return _codes(fmt, rows, columns) if fmt.extra(TwoPlanes) is not None else None


def _one_a_scale(fmt: Layout, rows: int, columns: int) -> tuple[int, ...]:
    if fmt.block_tiles:
        return -(-_tiles(rows) // fmt.block_tiles), fmt.groups(columns)
    return _tiles(rows), fmt.groups(columns), TILE_ROWS


def _scales(fmt: Layout, rows: int, columns: int) -> Stored | None:
    kind = "float16" if fmt.scale_type == "F16" else "uint8"
    return None if fmt.codebook else (kind, _one_a_scale(fmt, rows, columns))


def _zeros(fmt: Layout, rows: int, columns: int) -> Stored | None:
    return None if fmt.symmetric else ("uint8", _one_a_scale(fmt, rows, columns))


def _tensor_scale(fmt: Layout, _rows: int, _columns: int) -> Stored | None:
    return ("float32", (1,)) if fmt.scale_type == "E4M3" else None


def _codebook(fmt: Layout, rows: int, columns: int) -> Stored | None:
    return ("float16", (_tiles(rows), fmt.groups(columns), fmt.levels, TILE_ROWS)) if fmt.codebook else None


def _input_scale(fmt: Layout, _rows: int, _columns: int) -> Stored | None:
    return ("float32", (1,)) if fmt.has_input_scale else None


def _outlier_starts(fmt: Layout, rows: int, columns: int) -> Stored | None:
    return ("int32", (_tiles(rows) * TILE_ROWS + 1,)) if fmt.outliers(rows, columns) else None


def _outlier_columns(fmt: Layout, rows: int, columns: int) -> Stored | None:
    count = fmt.outliers(rows, columns)
    return ("int16" if columns < 1 << 15 else "int32", (count,)) if count else None


def _outlier_values(fmt: Layout, rows: int, columns: int) -> Stored | None:
    count = fmt.outliers(rows, columns)
    return ("float16", (count,)) if count else None


def _float_columns(fmt: Layout, _rows: int, _columns: int) -> Stored | None:
    features = fmt.extra(OutlierFeatures)
    return ("int32", (features.count,)) if features else None


def _float_values(fmt: Layout, rows: int, _columns: int) -> Stored | None:
    features = fmt.extra(OutlierFeatures)
    return ("float16", (_tiles(rows), features.count, TILE_ROWS)) if features else None


def _kept(fmt: Layout, rows: int, columns: int) -> Stored | None:
    blocks = fmt.extra(ColumnBlocks)
    if fmt.extra(SingleZeros) is not None:
        return "uint8", (_tiles(rows), -(-columns // STEP), TILE_ROWS, STEP // 8)
    if blocks is None:
        return None
    return "uint8", (-(-_tiles(rows) // blocks.tiles), -(-blocks.blocks(columns) // 64) * 8)


def _thresholds(fmt: Layout, _rows: int, columns: int) -> Stored | None:
    return ("float32", (columns,)) if fmt.extra(SkippedInputs) is not None else None


def _patterns(fmt: Layout, rows: int, columns: int) -> Stored | None:
    pattern = fmt.extra(KeptOfGroup)
    if pattern is None:
        return None
    return "int32", (_tiles(rows), -(-columns // pattern.size * pattern.index_bits // 32), TILE_ROWS)


def _starts(fmt: Layout, rows: int, _columns: int) -> Stored | None:
    return ("int32", (_tiles(rows),)) if fmt.extra(SingleZeros) is not None else None


PART_TABLE = (
    Part("codes", _codes, is_tiled=True),
    Part("lower", _lower, is_tiled=True),
    Part("scales", _scales, is_tiled=True, timing_fill=1),
    Part("zeros", _zeros, is_tiled=True),
    Part("tensor_scale", _tensor_scale, timing_fill=1),
    Part("codebook", _codebook, is_tiled=True),
    Part("input_scale", _input_scale),
    Part("outlier_starts", _outlier_starts, timing_fill="even"),
    Part("outlier_columns", _outlier_columns),
    Part("outlier_values", _outlier_values),
    Part("float_columns", _float_columns),
    Part("float_values", _float_values),
    Part("kept", _kept, is_tiled=True, timing_fill=255),
    Part("thresholds", _thresholds),
    Part("patterns", _patterns, is_tiled=True),
    Part("starts", _starts),
)
"""All parts, in the order in which kernels take them."""
PARTS = tuple(part.name for part in PART_TABLE)
"""Names of the tensors of a packed weight."""
TILED = tuple(part.name for part in PART_TABLE if part.is_tiled)
"""Those whose first dimension is tiles of rows."""
CODES = ("codes", "lower")
"""Names of the parts that hold codes."""
TIMING_FILL = {part.name: part.timing_fill for part in PART_TABLE}
"""What each holds while schedules are timed."""


def stored_parts(fmt: Layout, out_features: int, in_features: int) -> dict[str, Stored]:
    """Return type and shape of each tensor that an [out, in] weight is stored as."""
    found = ((part.name, part.stored(fmt, out_features, in_features)) for part in PART_TABLE)
    return {name: stored for name, stored in found if stored is not None}


def part_bytes(stored: Stored) -> int:
    """Count the bytes of one tensor."""
    kind, shape = stored
    return _BYTES[kind] * prod(shape)
