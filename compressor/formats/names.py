"""Names of formats, read and written; :mod:`compressor.formats.format` says what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compressor.formats.activations import NUMBERS, SCALES, SHORT, Activations
from compressor.formats.elements import Element

BLOCKS: Mapping[str, int] = MappingProxyType({"E8M0": 32, "E4M3": 16})
"""Columns a scale of the types that standards fix."""
_GRANULARITY = r"(?:_(?:(?P<spans>[GB])(?P<size>\d{1,9})|(?P<strategy>[CT])))?"
_NAME = re.compile(
    rf"(?P<grid>W|BIP|BAL)(?P<bits>\d{{1,3}})A(?P<act>{NUMBERS})(?P<asym>_ASYM)?{_GRANULARITY}(?P<fed>{SCALES})?",
    re.ASCII,
)
_FED = re.compile(rf"(?P<weights>.+?)(?:_A(?P<act>{NUMBERS})(?P<fed>{SCALES})?)?", re.ASCII)
_ELEMENT_NAME = re.compile(rf"(?:FP(?P<bits>\d)_)?(?P<element>E\dM\d|NF4){_GRANULARITY}", re.ASCII)
_CODEBOOK_NAME = re.compile(rf"LUT(?P<bits>\d){_GRANULARITY}", re.ASCII)
_FLOATS_NAME = re.compile(r"(.+?)(?:_S(?P<outliers>\d{1,2}(?:\.\d{1,3})?))?(?:_F(?P<columns>\d{1,5}))?", re.ASCII)
_MX_NAME = re.compile(r"MXFP(?P<bits>\d)_(?P<element>E\dM\d)", re.ASCII)


def number(fmt: Any) -> str:
    """Grid and bits of integers, as names begin; a balanced grid has one value more than its bits say."""
    return f"{fmt.sliced or 'W'}{fmt.bits - (fmt.sliced == 'BAL')}"


def write_name(fmt: Any) -> str:
    """The canonical name."""
    floats = f"_S{fmt.outlier_percent:g}" if fmt.outlier_percent else ""
    floats += f"_F{fmt.float_columns}" if fmt.float_columns else ""
    whole = number(fmt) in ("W8", "BIP8") or (fmt.element is not None and fmt.bits == 8)
    suffix = {"tensor": "_T", "channel": "" if whole else "_C"}
    suffix |= {"group": f"_G{fmt.group_size}", "block": f"_B{fmt.group_size}"}
    fed = fmt.activations
    numbers, scales = ("16", "") if fed is None else (fed.numbers, fed.scales)
    if fmt.element is None and not fmt.codebook:
        return f"{number(fmt)}A{numbers}{'' if fmt.symmetric else '_ASYM'}{suffix[fmt.strategy]}{scales}{floats}"
    if fmt.codebook or fmt.element is None:
        element = f"LUT{fmt.bits}{f'_G{fmt.group_size}' if fmt.group_size else ''}"
    elif fmt.scale_type == "E4M3":
        element = "NVFP4"
    else:
        element = f"FP{fmt.bits}_{fmt.element.name}" if fmt.element.is_float else fmt.element.name
        if fmt.scale_type == "E8M0":
            element = "MXFP4" if element == "FP4_E2M1" else f"MX{element}"
        else:
            element += suffix[fmt.strategy]
    return element + ("" if fed is None else f"_A{numbers}{scales}") + floats


def read_name(name: str) -> dict[str, Any] | None:
    """The fields of the format that a name stands for; None if it stands for none."""
    match = _FLOATS_NAME.fullmatch(name.strip().upper())
    codes = None if match is None else _read_codes(match[1])
    if match is None or codes is None:
        return None
    floats = {"outlier_percent": float(match["outliers"] or 0), "float_columns": int(match["columns"] or 0)}
    return {**codes, **floats}


def _read_codes(given: str) -> dict[str, Any] | None:
    """The same of a name without what is stored as floats."""
    if (match := _NAME.fullmatch(given)) is not None:
        bits, grid = int(match["bits"]), match["grid"]
        fields = {"bits": bits + (grid == "BAL"), "symmetric": match["asym"] is None, **_granularity(match, bits, 128)}
        fed = Activations.parse(match["act"], match["fed"])
        return {**fields, "activations": fed, "sliced": None if grid == "W" else grid}
    fed = None
    if (sides := _FED.fullmatch(given)) is not None and sides["act"] not in (None, "16"):
        given, fed = sides["weights"], Activations.parse(sides["act"], sides["fed"])
    if (match := _CODEBOOK_NAME.fullmatch(given)) is not None:
        spans = _granularity(match, 8, 0)  # a row has one codebook unless a group size is given
        return {"bits": int(match["bits"]), **spans, "activations": fed, "codebook": True}
    if given == "NVFP4":
        return _standard(Element.parse("E2M1"), "E4M3", fed)
    head, _, tail = given.partition("_")
    if head in SHORT and not tail.startswith("E"):
        given = SHORT[head] + (f"_{tail}" if tail else "")
    for pattern in (_ELEMENT_NAME, _MX_NAME):
        match = pattern.fullmatch(given)
        element = None if match is None else Element.parse(match["element"])
        if match is None or element is None or (match["bits"] or "4") != str(element.bits):
            continue
        if pattern is _MX_NAME:
            return _standard(element, "E8M0", fed)
        default = 128 if element.is_float else 64  # QLoRA's blocks
        spans = _granularity(match, element.bits, default)
        return {"bits": element.bits, **spans, "activations": fed, "element": element}
    return None


def _standard(element: Element | None, scale_type: str, fed: Activations | None) -> dict[str, Any] | None:
    """Blocks that a standard prescribes."""
    if element is None:
        return None
    fields = {"bits": element.bits, "strategy": "group", "group_size": BLOCKS[scale_type], "activations": fed}
    return {**fields, "element": element, "scale_type": scale_type}


def _granularity(match: re.Match[str], bits: int, group_size: int) -> dict[str, Any]:
    """Strategy and group size of a name; ``group_size`` is that of fewer than 8 bits where the name says nothing."""
    if match["size"] or (match["strategy"] is None and bits < 8):
        return {
            "strategy": "block" if match["spans"] == "B" else "group",
            "group_size": int(match["size"] or group_size),
        }
    return {"strategy": "tensor" if match["strategy"] == "T" else "channel"}
