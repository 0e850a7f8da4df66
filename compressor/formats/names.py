"""Names of formats, read and written; :mod:`compressor.formats.format` says what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from compressor.errors import UsageError
from compressor.formats.activations import NUMBERS, SCALES, SHORT, Activations
from compressor.formats.elements import Element
from compressor.formats.extras import EXTRAS, Extra
from compressor.formats.weights import (
    BitPlanes,
    BlockScales,
    ChannelScales,
    Codebook,
    E4M3Scales,
    E8M0Scales,
    Floats,
    GroupScales,
    Integers,
    Scales,
    TensorScale,
    Weights,
)

_GRANULARITY = r"(?:_(?:(?P<spans>[GB])(?P<size>\d{1,9})|(?P<strategy>[CT])))?"
_INTEGER_NAME = re.compile(
    rf"(?P<grid>W|BIP|BAL)(?P<bits>\d{{1,3}})A(?P<act>{NUMBERS})(?P<asym>_ASYM)?{_GRANULARITY}(?P<act_scales>{SCALES})?",
    re.ASCII,
)
_WITH_ACTIVATIONS = re.compile(rf"(?P<weights>.+?)(?:_A(?P<act>{NUMBERS})(?P<act_scales>{SCALES})?)?", re.ASCII)
_ELEMENT_NAME = re.compile(rf"(?:FP(?P<bits>\d)_)?(?P<element>E\dM\d|NF4){_GRANULARITY}", re.ASCII)
_CODEBOOK_NAME = re.compile(rf"LUT(?P<bits>\d){_GRANULARITY}", re.ASCII)
_MX_NAME = re.compile(r"MXFP(?P<bits>\d)_(?P<element>E\dM\d)", re.ASCII)


class Terms(NamedTuple):
    """The terms of a format, in the order of :class:`compressor.formats.format.Format`."""

    weights: Weights
    scales: Scales
    activations: Activations | None = None
    extras: tuple[Extra, ...] = ()


def write_name(terms: Terms) -> str:
    """Return the canonical name."""
    weights, scales, act, extras = terms
    numbers, act_scales = ("16", "") if act is None else (act.numbers, act.scales)
    end = "".join(extra.suffix for extra in extras)
    if isinstance(weights, Integers | BitPlanes):
        asymmetric = "_ASYM" if isinstance(weights, Integers) and not weights.symmetric else ""
        return f"{weights.name}A{numbers}{asymmetric}{_suffix(weights, scales)}{act_scales}{end}"
    if isinstance(scales, E4M3Scales):
        name = "NVFP4"
    elif isinstance(scales, E8M0Scales):
        name = "MXFP4" if weights.name == "FP4_E2M1" else f"MX{weights.name}"
    else:
        name = weights.name + _suffix(weights, scales)
    return name + ("" if act is None else f"_A{numbers}{act_scales}") + end


def _suffix(weights: Weights, scales: Scales) -> str:
    """Return the suffix of the scales: none where one a channel is what the name means without."""
    assert not isinstance(scales, E8M0Scales | E4M3Scales)
    is_default = isinstance(scales, ChannelScales) and _is_of_channels(weights)
    return "" if is_default else scales.suffix


def _is_of_channels(weights: Weights) -> bool:
    """Tell whether the weights have one scale a channel unless the name says otherwise: 8 bits, and codebooks."""
    is_eight = weights.bits == 8 and not (isinstance(weights, BitPlanes) and weights.grid == "balanced")
    return is_eight or isinstance(weights, Codebook)


def read_name(name: str) -> Terms | None:
    """Return the terms of the format that a name stands for; None if it stands for none."""
    suffixes = "".join(f"(?:{kind.pattern})?" for kind in EXTRAS)
    match = re.fullmatch(f"(.+?){suffixes}", name.strip().upper(), re.ASCII)
    terms = None if match is None else _read_terms(match[1])
    if match is None or terms is None:
        return None
    named = ((kind, text) for kind, text in zip(EXTRAS, match.groups()[1:], strict=True) if text is not None)
    extras = (kind.read(text) for kind, text in named)
    return terms._replace(extras=tuple(extra for extra in extras if extra is not None))


def _read_terms(text: str) -> Terms | None:
    """Read a name without extras."""
    if (match := _INTEGER_NAME.fullmatch(text)) is not None:
        weights = _integers(match["grid"], int(match["bits"]), match["asym"] is not None)
        return Terms(weights, _scales(match, weights), Activations.parse(match["act"], match["act_scales"]))
    act = None
    if (match := _WITH_ACTIVATIONS.fullmatch(text)) is not None and match["act"] not in (None, "16"):
        text, act = match["weights"], Activations.parse(match["act"], match["act_scales"])
    codes = _read_codes(text)
    return None if codes is None else Terms(*codes, act)


def _integers(grid: str, bits: int, is_asymmetric: bool) -> Integers | BitPlanes:
    if grid == "W":
        return Integers(bits, not is_asymmetric)
    planes = BitPlanes("bipolar", bits) if grid == "BIP" else BitPlanes("balanced", bits + 1)
    if is_asymmetric:
        raise UsageError(f"format: {grid} grids are symmetric integers")
    return planes


def _read_codes(text: str) -> tuple[Weights, Scales] | None:
    """Read codes that are not integers, without their activations."""
    if (match := _CODEBOOK_NAME.fullmatch(text)) is not None:
        codebook = Codebook(int(match["bits"]))
        return codebook, _scales(match, codebook)
    if text == "NVFP4":
        return Floats(Element("E2M1", 2, 1)), E4M3Scales()
    head, _, tail = text.partition("_")
    if head in SHORT and not tail.startswith("E"):
        text = SHORT[head] + (f"_{tail}" if tail else "")
    for pattern in (_ELEMENT_NAME, _MX_NAME):
        match = pattern.fullmatch(text)
        element = None if match is None else Element.parse(match["element"])
        if match is None or element is None or (match["bits"] or "4") != str(element.bits):
            continue
        floats = Floats(element)
        return floats, E8M0Scales() if pattern is _MX_NAME else _scales(match, floats)
    return None


def _scales(match: re.Match[str], weights: Weights) -> Scales:
    """Return the scales that a name says, or means: one a channel of 8 bits, otherwise groups of 128, or of NF4 64."""
    if match["size"]:
        return (BlockScales if match["spans"] == "B" else GroupScales)(int(match["size"]))
    if match["strategy"] is not None:
        return TensorScale() if match["strategy"] == "T" else ChannelScales()
    if _is_of_channels(weights):
        return ChannelScales()
    return GroupScales(64 if weights.name == "NF4" else 128)  # QLoRA's blocks have 64


_FLOATS = ("FP8_E4M3", "FP8_E5M2", "FP6_E3M2", "FP6_E2M3", "FP4_E2M1", "FP4_E1M2", "FP4_E3M0")


def _presets() -> Iterator[str]:
    for bits in (2, 3, 4, 5, 6, 7, 8):
        for act in ("A16", "A8"):
            for symmetric in ("", "_ASYM"):
                yield from (f"W{bits}{act}{symmetric}_G{size}" for size in (32, 64, 128))
    for bits in (4, 8):
        for act in ("A16", "A8"):
            for symmetric in ("", "_ASYM"):
                yield from (f"W{bits}{act}{symmetric}{suffix}" for suffix in ("_C", "_T"))
    yield from (f"{name}{suffix}" for name in _FLOATS for suffix in ("_G32", "_G64", "_G128", "_C"))
    yield from ("NF4_G32", "NF4_G64", "NF4_G128", "NVFP4", "MXFP4")
    yield from (f"MX{name}" for name in _FLOATS[:4])
    yield from (f"LUT{bits}{suffix}" for bits in (2, 3, 4) for suffix in ("", "_G128", "_S0.45"))
    yield from ("W8A8_B128", "FP8_E4M3_B128", "FP8_E4M3_B128_AFP8_E4M3_AG128")
    yield from (f"BIP{bits}{side}_G128" for bits in range(1, 9) for side in ("A16", "A8"))
    yield from (f"{grid}{side}_G128" for grid in ("BIP2", "BAL2") for side in ("A2", "A4"))
    yield from ("BIP1A1_G128", "BAL1A16_G128", "BAL1A8_G128", "BAL2A16_G128", "BAL2A8_G128", "BIP4A4_G128")
    yield from ("W4A4_G128", "W6A6_G128", "W8A8_STATIC", "W4A8_G128_AG128", "W4A4_G128_AG128", "W4AFP8_E4M3_G128")
    yield from ("FP8_E4M3_AFP8_E4M3", "FP8_E4M3_AFP8_E4M3_STATIC", "FP8_E5M2_AFP8_E5M2")
    yield from ("FP4_E2M1_G128_AFP4_E2M1_STATIC", "MXFP4_AMXFP4", "MXFP6_E2M3_AMXFP6_E2M3", "MXFP8_E4M3_AMXFP8_E4M3")
    yield from ("NVFP4_ANVFP4", "W8A8_B16x1@80", "W8A16_B16x1@80", "W4A8_G64_B16x1@80", "W4A16_G64_B16x1@80")
    yield from ("W8A8_STATIC_B32x4@30", "W8A8_B32x64@80")


PRESETS = tuple(_presets())
"""Names that ``compress list formats`` shows, in this order."""
