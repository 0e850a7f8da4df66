"""The parts that bundles store, against the table of parts."""

from __future__ import annotations

import pytest

from compressor.errors import VerificationError
from compressor.formats.format import FORMATS, Format
from compressor.formats.parts import SAFETENSORS_TYPES, part_bytes
from compressor.verify.bundle import _packed_bytes

Header = dict[str, tuple[str, list[int], tuple[int, int]]]


def header(fmt: Format, rows: int, columns: int) -> Header:
    """Return what a safetensors header says about the parts of one weight."""
    entries: Header = {}
    end = 0
    for name, (kind, shape) in fmt.parts(rows, columns).items():
        start, end = end, end + part_bytes((kind, shape))
        entries[name] = (SAFETENSORS_TYPES[kind], list(shape), (start, end))
    return entries


@pytest.mark.parametrize("columns", [300, 32736, 32737, 32767, 32768, 32769])
def test_outliers_are_verified_whatever_type_their_columns_have(columns: int) -> None:
    fmt = Format.parse("LUT3_S0.45")
    stored = header(fmt, 40, columns)
    assert stored["outlier_columns"][0] == ("I16" if columns < 32768 else "I32")
    assert _packed_bytes("linear", fmt.name, stored) == fmt.packed_bytes(40, columns)


@pytest.mark.parametrize(
    "name", [*FORMATS, "W8A8_F8", "W4A8_G64_S1", "NVFP4_S0.5", "W8A16_2:4", "W4A16_G32_1:4", "W8A16_B1x1@50"]
)
def test_every_format_is_verified(name: str) -> None:
    fmt = Format.parse(name)
    for rows, columns in ((16, 256), (41, 700)):
        assert _packed_bytes("linear", name, header(fmt, rows, columns)) == fmt.packed_bytes(rows, columns)


def test_a_part_of_another_type_is_refused() -> None:
    stored = header(Format.parse("LUT3_S0.45"), 40, 300)
    _, shape, span = stored["outlier_columns"]
    stored["outlier_columns"] = ("I32", shape, span)
    with pytest.raises(VerificationError, match="linear: stored as"):
        _packed_bytes("linear", "LUT3_S0.45", stored)


def test_a_weight_without_codes_is_refused() -> None:
    with pytest.raises(VerificationError, match="codes and scales"):
        _packed_bytes("linear", "W4A16_G128", {})
