"""Number formats of key-value caches as data.

A :class:`CacheFormat` says how the keys, or the values, of one token and one head are stored: its *row*.  Scales are
chosen anew for every token and head, so nothing is calibrated and no row depends on another.  Names follow the field:
``INT8`` (one float16 scale a token and head), ``INT4_G32`` (one for 32 channels), ``FP8_E4M3``, and block floating
point, ``BFP8_G16`` and ``BFP4_G32``: blocks of channels share an exponent of 8 bits, and each has a mantissa of 8 or 4
bits, sign included (Rouhani et al. 2020, "Pushing the Limits of Narrow Precision Inferencing at Cloud Scale with
Microsoft Floating Point"; with 8 bits and blocks of 32 it is MXINT8 of OCP Microscaling 1.0).

Bit layout of a row of ``D`` channels (what :mod:`compressor.formats.layouts.packed_cache` writes and the kernels read)
-------------------------------------------------------------------------------------------------------
Bytes, without padding: first the codes, then the scales of the groups in order::

    8 bits   D bytes; byte j is channel j
    4 bits   ceil(D / 2) bytes; byte j is channel j (low half) and channel ceil(D / 2) + j (high half; 0 past the end)
    scales   F16: 2 bytes each, the low one first      E8M0: 1 byte each, 127 more than the exponent; 255 is NaN

``value = code * scale``.  Integers and mantissas are two's complement and use ``-(2 ** (bits - 1) - 1)`` to its
opposite, E4M3 codes its values (:mod:`compressor.formats.elements`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from compressor.errors import UnknownFormatError, UsageError
from compressor.formats.elements import Element

DENSE_CACHE = "FP32"
"""The name of what a cache is before a pass changes it: float32, no scales."""

_GROUP_SIZES = (8, 16, 32, 64, 128, 256)
_NAME = re.compile(r"(?:(?P<kind>INT|BFP)(?P<bits>[48])|FP8(?:_E4M3)?)(?:_G(?P<group>\d{1,3}))?", re.ASCII)


@dataclass(frozen=True)
class CacheFormat:
    """How one token's keys or values of one head are stored.

    Attributes:
        bits: of a code, 4 or 8.
        group_size: channels a scale; 0 for all of the head's.  The last group may be shorter.
        element: what a code stands for; None for integers.
        scale_type: ``F16``: the largest channel of the group becomes the largest code, nearly; ``E8M0``: its exponent.
    """

    bits: int
    group_size: int = 0
    element: Element | None = None
    scale_type: Literal["F16", "E8M0"] = "F16"

    example: ClassVar[str] = "INT8"

    def __post_init__(self) -> None:
        if self.group_size and self.group_size not in _GROUP_SIZES:
            sizes = ", ".join(map(str, _GROUP_SIZES))
            raise UsageError(f"cache format: groups of {self.group_size} channels; there are: {sizes}")

    @property
    def name(self) -> str:
        """The canonical name; ``CacheFormat.parse(fmt.name) == fmt``."""
        kind = "BFP" if self.scale_type == "E8M0" else "INT" if self.element is None else "FP"
        element = f"_{self.element.name}" if self.element is not None else ""
        return f"{kind}{self.bits}{element}{f'_G{self.group_size}' if self.group_size else ''}"

    @classmethod
    def parse(cls, name: str) -> CacheFormat:
        """Read a name such as ``INT8``; without a suffix ``INT4`` means ``_G32`` and block floating point ``_G16``.

        Raises:
            UsageError: the name is none; the nearest is named.
        """
        match = _NAME.fullmatch(name.strip().upper())
        if match is None:
            near = difflib.get_close_matches(name[:80].upper(), list(CACHE_FORMATS), n=1, cutoff=0.0)
            raise UnknownFormatError(
                f"cache format {name!r:.80} is unknown; a name is INT8, INT4, FP8_E4M3, BFP8 or BFP4, with "
                f"_G<channels> for one scale a group; nearest: {near[0]}"
            )
        if match["kind"] is None:
            return cls(8, int(match["group"] or 0), Element.parse("E4M3"))
        bits, group = int(match["bits"]), int(match["group"] or 0)
        if match["kind"] == "BFP":
            return cls(bits, group or 16, None, "E8M0")
        return cls(bits, group or (32 if bits == 4 else 0))

    @property
    def max_value(self) -> float:
        """The largest value of a code."""
        return float(2 ** (self.bits - 1) - 1) if self.element is None else self.element.max_value

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return 2 if self.scale_type == "F16" else 1

    def span(self, width: int) -> int:
        """Channels of a whole group of a head of ``width`` channels."""
        return min(self.group_size or width, width)

    def groups(self, width: int) -> int:
        """Scales of a row."""
        return -(-width // self.span(width))

    def code_bytes(self, width: int) -> int:
        """Bytes of a row's codes."""
        return -(-width * self.bits // 8)

    def row_bytes(self, width: int) -> int:
        """Bytes of a row: the keys, or the values, of one token and head."""
        return self.code_bytes(width) + self.scale_bytes * self.groups(width)


def cache_row(name: str, width: int) -> tuple[str, int]:
    """Return the element type of a cache, named as NumPy names it, and its elements a row."""
    if name == DENSE_CACHE:
        return "float32", width
    return "uint8", CacheFormat.parse(name).row_bytes(width)


def cache_bytes_per_token(name: str, heads: Sequence[int], width: int) -> int:
    """Return the bytes of all keys and values of one token.

    Args:
        heads: of keys, of each cache.
    """
    kind, size = cache_row(name, width)
    return 2 * sum(heads) * size * (4 if kind == "float32" else 1)


CACHE_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            CacheFormat(8),
            CacheFormat(4, 32),
            CacheFormat(8, 0, Element.parse("E4M3")),
            CacheFormat(8, 16, None, "E8M0"),
            CacheFormat(8, 32, None, "E8M0"),
            CacheFormat(4, 16, None, "E8M0"),
            CacheFormat(4, 32, None, "E8M0"),
        )
    }
)
"""Formats by name, those that are listed; any other group size works as well."""
