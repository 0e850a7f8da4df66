"""Codes of a weight and their scales, as data: each kind is a small class that cannot be wrong by itself.

A code is one of :class:`Integers`, :class:`Floats`, :class:`Codebook` or :class:`BitPlanes`; its scale one of
:class:`TensorScale`, :class:`ChannelScales`, :class:`GroupScales`, :class:`BlockScales`, :class:`E8M0Scales` or
:class:`E4M3Scales`.  Which of them go together is said by :class:`compressor.formats.format.Format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from compressor.errors import UsageError
from compressor.formats.elements import Element
from compressor.formats.parts import TILE_ROWS

Strategy = Literal["tensor", "channel", "group", "block"]
ScaleType = Literal["F16", "E8M0", "E4M3"]
PlaneGrid = Literal["bipolar", "balanced"]

LARGEST_GROUP = 1 << 20
PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
)
"""Widths of the bit planes of a code, lowest bits first; those of :class:`BitPlanes` are all 1."""


@dataclass(frozen=True)
class Integers:
    """Integers: ``value = (code - zero) * scale``.

    Attributes:
        bits: of a code, 2 to 8.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise one uint8 a scale is stored.
    """

    bits: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise UsageError(
                f"format: {self.bits} bits; integer formats have 2 to 8 bits, or with bit planes, BIP, 1 to 8"
            )

    @property
    def name(self) -> str:
        """Beginning of a format's name."""
        return f"W{self.bits}"

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return PLANES[self.bits]

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    @property
    def zero_point(self) -> float:
        """Code of zero on a symmetric grid."""
        return float(1 << (self.bits - 1))


@dataclass(frozen=True)
class Floats:
    """Small floats, or the values of a fixed table: ``value = element(code) * scale``."""

    element: Element

    @property
    def name(self) -> str:
        """Beginning of a format's name."""
        return f"FP{self.bits}_{self.element.name}" if self.element.is_float else self.element.name

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.element.bits

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return PLANES[self.bits]

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << self.bits


@dataclass(frozen=True)
class Codebook:
    """Codebooks: each row or group stores float16 values of its own, in place of a scale: ``value = codebook[code]``.

    Attributes:
        bits: of a code, 2 to 4.
    """

    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 4:
            raise UsageError("format: codebooks have 2 to 4 bits, and float activations")

    @property
    def name(self) -> str:
        """Beginning of a format's name."""
        return f"LUT{self.bits}"

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return PLANES[self.bits]

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << self.bits


@dataclass(frozen=True)
class BitPlanes:
    """Symmetric integers whose codes lie in planes of one bit.

    Attributes:
        grid: ``bipolar``, without a zero; or ``balanced``, with a zero and as many values below as above it.
        bits: of a code, 1 to 8; of a balanced grid 2 to 8, one more than its name says.
    """

    grid: PlaneGrid
    bits: int

    def __post_init__(self) -> None:
        if self.grid == "bipolar" and not 1 <= self.bits <= 8:
            raise UsageError(f"format: {self.name}; BIP has 1 to 8 bits")
        if self.grid == "balanced" and not 2 <= self.bits <= 8:
            raise UsageError(f"format: {self.name}; BAL has 1 to 7 bits, and takes one more")

    @property
    def name(self) -> str:
        """Beginning of a format's name."""
        return f"BIP{self.bits}" if self.grid == "bipolar" else f"BAL{self.bits - 1}"

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return (1,) * self.bits

    @property
    def levels(self) -> int:
        """Number of codes that are in use."""
        return 1 << self.bits if self.grid == "bipolar" else (1 << (self.bits - 1)) + 1

    @property
    def zero_point(self) -> float:
        """Code of zero: a whole number on balanced grids, and a half on bipolar ones."""
        return (self.levels - 1) / 2


@dataclass(frozen=True)
class TensorScale:
    """One float16 scale for the whole weight.  It is stored once a row, so that one kernel serves all strategies."""

    strategy: ClassVar[Strategy] = "tensor"
    type: ClassVar[ScaleType] = "F16"
    size: ClassVar[int] = 0
    suffix: ClassVar[str] = "_T"


@dataclass(frozen=True)
class ChannelScales:
    """One float16 scale for each output channel."""

    strategy: ClassVar[Strategy] = "channel"
    type: ClassVar[ScaleType] = "F16"
    size: ClassVar[int] = 0
    suffix: ClassVar[str] = "_C"


@dataclass(frozen=True)
class GroupScales:
    """One float16 scale for every ``size`` columns of a row; the last group may be shorter."""

    size: int
    strategy: ClassVar[Strategy] = "group"
    type: ClassVar[ScaleType] = "F16"

    def __post_init__(self) -> None:
        _check_size(self.size, "group")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_G{self.size}"


@dataclass(frozen=True)
class BlockScales:
    """One float16 scale for a block of ``size`` rows by ``size`` columns; the last blocks may be smaller."""

    size: int
    strategy: ClassVar[Strategy] = "block"
    type: ClassVar[ScaleType] = "F16"

    def __post_init__(self) -> None:
        if self.size % TILE_ROWS:
            raise UsageError(f"format: blocks have float16 scales, and a multiple of {TILE_ROWS} rows and columns")
        _check_size(self.size, "block")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_B{self.size}"


@dataclass(frozen=True)
class E8M0Scales:
    """One power of two for 32 columns of a row (OCP Microscaling Formats 1.0)."""

    strategy: ClassVar[Strategy] = "group"
    type: ClassVar[ScaleType] = "E8M0"
    size: ClassVar[int] = 32


@dataclass(frozen=True)
class E4M3Scales:
    """One E4M3 float for 16 columns of a row, and one float32 for the whole weight (NVFP4)."""

    strategy: ClassVar[Strategy] = "group"
    type: ClassVar[ScaleType] = "E4M3"
    size: ClassVar[int] = 16


Weights: TypeAlias = Integers | Floats | Codebook | BitPlanes
StandardScales: TypeAlias = E8M0Scales | E4M3Scales
"""Scales that a standard fixes, with their size."""
Scales: TypeAlias = TensorScale | ChannelScales | GroupScales | BlockScales | StandardScales


def _check_size(size: int, strategy: Strategy) -> None:
    if size <= 0:
        raise UsageError(f"format: a {strategy} of {size} weights; give a whole number above 0, such as 128")
    if size > LARGEST_GROUP:
        raise UsageError(f"format: group size {size}; the largest is {LARGEST_GROUP}")
