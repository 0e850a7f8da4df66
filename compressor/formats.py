"""Number formats as data.

A :class:`Format` says how the weights of a linear are stored and how its activations are fed: bits,
symmetric or asymmetric grid, granularity of the scales, and float or int8 activations.  Names follow
the field: ``W4A16_G128``, ``W4A8_ASYM_G32``, ``W8A8`` (one scale a channel), ``W8A8_T`` (one a tensor).

Bit layout (what :mod:`compressor.packing` writes and the kernels read)
-----------------------------------------------------------------------
Codes are unsigned, ``value = (code - zero) * scale``.  A code of ``b`` bits is cut into planes of 8, 4, 2
or 1 bits, lowest bits first (:data:`PLANES`: 3 = 2 + 1, 6 = 4 + 2).  A row is cut into chunks of as many
columns as fill one 32-bit word of the narrowest plane; a chunk is, plane after plane, a whole number of
words.  In a word of a ``p``-bit plane, column ``4 * j + i`` lies in byte ``i`` at bits ``p * j`` to
``p * j + p - 1``: a shift and a mask yield four columns in the four bytes of a word, which is the operand
of the dot-product instructions (``vpdpbusd``, ``sdot``, ``dot4U8Packed``).  Sixteen rows form a tile whose
words are interleaved::

    codes   int32    [ceil(out / 16), chunks, words per chunk, 16]
    scales  float16  [ceil(out / 16), groups, 16]
    zeros   uint8    [ceil(out / 16), groups, 16]      asymmetric formats only

Rows and columns that only fill up a tile or a chunk hold code 0 and scale 0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from compressor.errors import UsageError

Strategy = Literal["tensor", "channel", "group"]

TILE_ROWS = 16
LARGEST_GROUP = 1 << 20
PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
)
_NAME = re.compile(
    r"W(?P<bits>\d{1,3})A(?P<act>\d{1,3})(?P<asym>_ASYM)?(?:_(?:G(?P<group>\d{1,9})|(?P<strategy>[CT])))?", re.ASCII
)


@dataclass(frozen=True)
class Format:
    """How one linear is stored and computed.

    Attributes:
        bits: bits of a weight code, 2 to 8.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise one uint8 a scale is stored.
        strategy: one float16 scale per ``tensor``, output ``channel`` or ``group`` of columns of a row.
            (The tensor's scale is stored once a row, so that one kernel serves all strategies.)
        group_size: columns a group; 0 unless the strategy is ``group``.  The last group may be shorter.
        activation_bits: 16 computes on float activations; 8 quantises them to int8, symmetric, dynamic, per token.
    """

    bits: int
    symmetric: bool = True
    strategy: Strategy = "group"
    group_size: int = 0
    activation_bits: int = 16

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise UsageError(f"format: {self.bits} bits; integer formats have 2 to 8 bits")
        if self.activation_bits not in (8, 16):
            raise UsageError(f"format: A{self.activation_bits}; activations are 16 (float) or 8 (int8 per token)")
        if (self.strategy == "group") != (self.group_size > 0):
            raise UsageError(f"format: group_size {self.group_size} with strategy {self.strategy!r}")
        if self.group_size > LARGEST_GROUP:
            raise UsageError(f"format: group size {self.group_size}; the largest is {LARGEST_GROUP}")
        if self.group_size % self.chunk_columns:
            raise UsageError(
                f"format: group size {self.group_size} of a {self.bits}-bit format is not a multiple of "
                f"{self.chunk_columns}, the columns of one packed chunk; use {self._nearest_group_size()}"
            )

    def _nearest_group_size(self) -> int:
        return max(1, round(self.group_size / self.chunk_columns)) * self.chunk_columns

    @property
    def name(self) -> str:
        """The canonical name; ``Format.parse(fmt.name) == fmt``."""
        suffix = {"tensor": "_T", "channel": "" if self.bits == 8 else "_C", "group": f"_G{self.group_size}"}
        return f"W{self.bits}A{self.activation_bits}{'' if self.symmetric else '_ASYM'}{suffix[self.strategy]}"

    @classmethod
    def parse(cls, name: str) -> Format:
        """Read a name such as ``W4A16_G128``; without a suffix 8 bits mean one scale a channel, fewer ``_G128``.

        Raises:
            UsageError: the name is none; the nearest preset is named.
        """
        match = _NAME.fullmatch(name.strip().upper())
        if match is None:
            near = difflib.get_close_matches(name[:80].upper(), list(FORMATS), n=1, cutoff=0.0)
            raise UsageError(
                f"format {name!r:.80} is unknown; a name is W<bits>A<16|8>[_ASYM][_G<size>|_C|_T]; nearest: {near[0]}"
            )
        bits = int(match["bits"])
        strategy: Strategy
        if match["group"] or (match["strategy"] is None and bits < 8):
            strategy, group_size = "group", int(match["group"] or 128)
        else:
            strategy, group_size = ("tensor" if match["strategy"] == "T" else "channel"), 0
        return cls(bits, match["asym"] is None, strategy, group_size, int(match["act"]))

    @property
    def levels(self) -> int:
        """Number of codes, ``2 ** bits``."""
        return 1 << self.bits

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return PLANES[self.bits]

    @property
    def chunk_columns(self) -> int:
        """Columns of one packed chunk."""
        return 32 // self.planes[-1]

    @property
    def chunk_words(self) -> int:
        """32-bit words a row and chunk."""
        return self.chunk_columns * self.bits // 32

    def chunks(self, in_features: int) -> int:
        """Chunks a row of ``in_features`` columns."""
        return -(-in_features // self.chunk_columns)

    def columns(self, in_features: int) -> int:
        """Columns a group (the whole row without groups)."""
        return self.group_size or in_features

    def groups(self, in_features: int) -> int:
        """Scales a row of ``in_features`` columns."""
        return -(-in_features // self.columns(in_features))

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of codes, scales and zeros of an [out, in] weight, padding included."""
        rows = -(-out_features // TILE_ROWS) * TILE_ROWS
        scale_bytes = 2 if self.symmetric else 3
        return rows * (self.chunks(in_features) * self.chunk_words * 4 + self.groups(in_features) * scale_bytes)


def _presets() -> dict[str, Format]:
    presets = [
        Format(bits, symmetric, "group", group_size, activation_bits)
        for bits in (2, 3, 4, 5, 6, 7, 8)
        for activation_bits in (16, 8)
        for symmetric in (True, False)
        for group_size in (32, 64, 128)
    ]
    presets += [
        Format(bits, symmetric, strategy, 0, activation_bits)
        for bits in (4, 8)
        for activation_bits in (16, 8)
        for symmetric in (True, False)
        for strategy in ("channel", "tensor")
    ]
    return {fmt.name: fmt for fmt in presets}


FORMATS: Mapping[str, Format] = MappingProxyType(_presets())
"""The presets that ``compress list formats`` shows; :meth:`Format.parse` reads any other size as well."""
