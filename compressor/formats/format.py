"""Number formats as data.

A :class:`Format` says how the weights of a linear are stored and how its activations are fed: what a code stands for,
granularity and type of the scales, and the same of the activations.  Names follow the field: ``W4A16_G128``,
``W4A8_ASYM_G32``, ``W8A8`` (one scale a channel), ``W8A8_T`` (one a tensor), ``FP8_E4M3_B128`` (one a block of 128 rows
by 128 columns); ``FP6_E3M2_G128``, ``FP8_E4M3``, ``NF4_G64`` (floats and tables); ``MXFP4``, ``MXFP6_E2M3``,
``MXFP8_E4M3`` (OCP Microscaling 1.0: blocks of 32, E8M0 scales) and ``NVFP4`` (blocks of 16, E4M3 scales, one float32
scale a tensor); ``LUT3``, ``LUT4_G128`` (codebooks: non-uniform values of each row or group); ``BIP2A8_G128``,
``BIP1A16`` (1 to 8 bit planes: bipolar-INT, Ma et al. 2024, arXiv 2409.17870) and ``BAL2A8`` (bit planes of a balanced
grid: bit balance of ABQ-LLM, Zeng et al. 2024, arXiv 2408.08554).  ``A16`` or nothing leaves activations as they are;
``A8`` and the like, ``W4AFP8_E4M3_G128``, ``MXFP4_AMXFP4``, ``W8A8_STATIC`` and ``W4A4_G128_AG128`` round them
(:mod:`compressor.formats.activations`).  ``_S0.45`` at the end: 0.45% of the weights are stored as float16 beside the
codes (dense-and-sparse, Kim et al. 2023, SqueezeLLM, arXiv 2306.07629); ``_F8``: eight input columns are (Dettmers et
al. 2022, LLM.int8(), arXiv 2208.07339), in float as well.

Bit layout (what :mod:`compressor.formats.packing` writes and the kernels read)
-----------------------------------------------------------------------
Codes are unsigned.  Of integers ``value = (code - zero) * scale``.  The ``zero`` of symmetric grids is ``2 ** (b -
1)``; of bipolar ones ``(2 ** b - 1) / 2``, so that ``value = (2 * code - (2 ** b - 1)) * scale / 2``: a sum of ``+-2 **
i``, one sign a bit; of balanced ones ``2 ** (b - 2)``, and their codes end at ``2 ** (b - 1)``: ``BAL2`` is {-2, -1, 0,
1, 2}, which takes three bits.  Of codebooks ``value = codebook[code]``; of the others ``value = element(code) * scale``
(:mod:`compressor.formats.elements`), with NVFP4 times the tensor's scale.  A code of ``b`` bits is cut into planes of
8, 4, 2 or 1 bits, lowest bits first (:data:`PLANES`: 3 = 2 + 1, 6 = 4 + 2); bipolar and balanced codes are cut into
planes of 1 bit.  A row is cut into chunks of as many columns as fill one 32-bit word of the narrowest plane; a chunk
is, plane after plane, a whole number of words.  In a word of a ``p``-bit plane, column ``4 * j + i`` lies in byte ``i``
at bits ``p * j`` to ``p * j + p - 1``: a shift and a mask yield four columns in the four bytes of a word, which is the
operand of the dot-product instructions (``vpdpbusd``, ``sdot``, ``dot4U8Packed``).  Sixteen rows form a tile whose
words are interleaved::

    codes         int32    [ceil(out / 16), chunks, words per chunk, 16]
    scales        float16  [ceil(out / 16), groups, 16]    uint8 where the type is E8M0 or E4M3
    zeros         uint8    [ceil(out / 16), groups, 16]    asymmetric formats only
                           [blocks of rows, groups]        both, where a scale serves a block
    tensor_scale  float32  [1]                             NVFP4 only
    codebook      float16  [ceil(out / 16), groups, 2 ** b, 16]  in place of scales; values rise with the code
    input_scale   float32  [1]                             activations with a calibrated scale only

What is stored as floats is added to what the codes stand for.  Single weights are in CSR over the rows of all tiles,
and their number is the percentage of rows and columns filled up to tiles and chunks, rounded; columns are whole::

    outlier_starts   int32    [16 * ceil(out / 16) + 1]
    outlier_columns  int16    [outliers]    int32 from 32,768 columns on
    outlier_values   float16  [outliers]
    float_columns    int32    [columns]
    float_values     float16  [ceil(out / 16), columns, 16]

Rows and columns that only fill up a tile or a chunk hold code 0 and scale 0 (of E8M0, which has no zero: byte 0).
FP6 is thereby stored as ZeroQuant(4+2) does (Wu et al. 2023, arXiv 2312.08583): a plane of 4 and a plane of 2 bits.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from compressor.errors import UsageError
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.formats.names import BLOCKS, number, read_name, write_name
from compressor.formats.parts import TILE_ROWS, part_bytes, stored_parts

Strategy = Literal["tensor", "channel", "group", "block"]
Sliced = Literal["BIP", "BAL"]
ScaleType = Literal["F16", "E8M0", "E4M3"]

LARGEST_GROUP = 1 << 20
PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
)


@dataclass(frozen=True)
class Format:
    """How one linear is stored and computed.

    Attributes:
        bits: bits of a weight code, 2 to 8; of bipolar ones 1 to 8.
        symmetric: the zero point is fixed at ``2 ** (bits - 1)``; otherwise one uint8 a scale is stored.
            Always so where codes are no integers.
        strategy: one scale per ``tensor``, output ``channel``, ``group`` of columns of a row, or square ``block``.
            (The tensor's scale is stored once a row, so that one kernel serves all strategies.)
        group_size: columns a group, or rows and columns a block, then a multiple of 16; otherwise 0.  The last ones
            may be shorter.
        activations: what they are rounded to; None computes on floats as they come.
        element: what a code stands for; None for integers.
        scale_type: ``F16``, or what MX and NVFP4 prescribe.
        codebook: each row or group has values of its own, float16, in place of a scale.
        outlier_percent: of the weights that are stored as float16.
        float_columns: input columns that are stored as float16.
        sliced: a symmetric grid whose codes lie in planes of one bit: ``BIP``, bipolar, without a zero; or ``BAL``,
            balanced, with a zero and as many values below as above it.
    """

    bits: int
    symmetric: bool = True
    strategy: Strategy = "group"
    group_size: int = 0
    activations: Activations | None = None
    element: Element | None = None
    scale_type: ScaleType = "F16"
    codebook: bool = False
    outlier_percent: float = 0.0
    float_columns: int = 0
    sliced: Sliced | None = None

    example: ClassVar[str] = "W4A16_G128"

    def __post_init__(self) -> None:
        fed = self.activations
        if self.codebook and not (
            2 <= self.bits <= 4 and self.element is None and self.symmetric and (fed is None or fed.element is not None)
        ):
            raise UsageError("format: codebooks have 2 to 4 bits, and float activations")
        if self.codebook and self.strategy in ("tensor", "block"):
            raise UsageError("format: codebooks are of channels or groups")
        if not 0 <= self.outlier_percent <= 10:
            raise UsageError(f"format: {self.outlier_percent:g}% of outliers; at most 10 pay")
        if self.float_columns and (self.element is not None or self.codebook):
            raise UsageError("format: columns in float16 stand beside integers")
        if self.element is not None and (
            (self.bits, self.symmetric) != (self.element.bits, True) or (fed is not None and fed.element is None)
        ):
            raise UsageError(f"format: {self.element.name} has {self.element.bits} bits, and float activations")
        block = BLOCKS.get(self.scale_type, self.group_size)
        if self.group_size != block or (self.scale_type != "F16" and self.element is None):
            raise UsageError(f"format: {self.scale_type} scales are of floats, one for {block} columns")
        if self.sliced and (self.element is not None or self.codebook or not self.symmetric):
            raise UsageError(f"format: {self.sliced} grids are symmetric integers")
        if self.sliced and not (1 if self.sliced == "BIP" else 2) <= self.bits <= 8:
            widths = "BIP has 1 to 8 bits" if self.sliced == "BIP" else "BAL has 1 to 7 bits, and takes one more"
            raise UsageError(f"format: {number(self)}; {widths}")
        if not self.sliced and self.bits not in PLANES:
            raise UsageError(
                f"format: {self.bits} bits; integer formats have 2 to 8 bits, or with bit planes, BIP, 1 to 8"
            )
        if self.strategy == "block" and (self.group_size % TILE_ROWS or self.scale_type != "F16"):
            raise UsageError(f"format: blocks have float16 scales, and a multiple of {TILE_ROWS} rows and columns")
        if (self.strategy in ("group", "block")) != (self.group_size > 0):
            raise UsageError(f"format: group_size {self.group_size} with strategy {self.strategy!r}")
        if self.group_size > LARGEST_GROUP:
            raise UsageError(f"format: group size {self.group_size}; the largest is {LARGEST_GROUP}")
        if self.group_size % self.chunk_columns:
            raise UsageError(
                f"format: group size {self.group_size} of a {self.bits}-bit format is not a multiple of "
                f"{self.chunk_columns}, the columns of one packed chunk; use {self._nearest_group_size()}"
            )

        if self.integer_products and fed is not None and fed.group_size:
            sizes = sorted((fed.group_size, self.group_size or fed.group_size))
            if sizes[1] % sizes[0] or fed.group_size % self.chunk_columns:
                raise UsageError(
                    f"format: integer activations in groups of {fed.group_size}, weights in groups of "
                    f"{self.group_size}; one must be a multiple of the other, and both of {self.chunk_columns}"
                )

    def _nearest_group_size(self) -> int:
        return max(1, round(self.group_size / self.chunk_columns)) * self.chunk_columns

    @property
    def name(self) -> str:
        """The canonical name; ``Format.parse(fmt.name) == fmt``."""
        return write_name(self)

    @classmethod
    def parse(cls, name: str) -> Format:
        """Read a name such as ``W4A16_G128``; without a suffix 8 bits mean one scale a channel, fewer ``_G128``.

        Raises:
            UsageError: the name is none; the nearest preset is named.
        """
        fields = read_name(name)
        if fields is not None:
            return cls(**fields)
        near = difflib.get_close_matches(name[:80].upper(), list(FORMATS), n=1, cutoff=0.0)
        raise UsageError(
            f"format {name!r:.80} is unknown; a name is W<bits>A<bits>[_ASYM][_G<size>|_B<size>|_C|_T], "
            "BIP<bits>A<bits> or BAL<bits>A<bits>[_G<size>|_B<size>|_C|_T], FP<bits>_E<bits>M<bits>[_G<size>|_B<size>|"
            "_C|_T], NF4[_G<size>], LUT<bits>[_G<size>], MXFP<bits>_E<bits>M<bits>, MXFP4 or NVFP4, and may go on with "
            f"_A<activations>, _STATIC or _AG<size>, and _S<percent>; nearest: {near[0]}"
        )

    @property
    def without_outliers(self) -> Format:
        """The format of the codes alone: without weights and columns stored as float16."""
        return replace(self, outlier_percent=0.0, float_columns=0)

    def outliers(self, out_features: int, in_features: int) -> int:
        """Single weights of an [out, in] weight that are stored as float16."""
        rows = -(-out_features // TILE_ROWS) * TILE_ROWS
        return round(self.outlier_percent / 100 * rows * self.chunks(in_features) * self.chunk_columns)

    @property
    def levels(self) -> int:
        """Number of codes: ``2 ** bits``, or of a balanced grid as many as are in use."""
        return (1 << (self.bits - 1)) + 1 if self.sliced == "BAL" else 1 << self.bits

    @property
    def zero_point(self) -> float:
        """The zero point of a symmetric grid: a whole number, and a half of bipolar grids."""
        return (self.levels - 1) / 2 if self.sliced else float(1 << (self.bits - 1))

    @property
    def integer_products(self) -> bool:
        """Whether codes and activations are both integers, and so are their products."""
        return self.element is None and self.activations is not None and self.activations.element is None

    @property
    def has_input_scale(self) -> bool:
        """Whether a calibrated scale of the activations is stored: the part ``input_scale``."""
        return self.activations is not None and self.activations.calibrated

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes, lowest bits first."""
        return (1,) * self.bits if self.sliced else PLANES[self.bits]

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

    def grid_rows(self, out_features: int) -> int:
        """Neighbouring rows that share their grids."""
        return {"tensor": out_features, "block": self.group_size}.get(self.strategy, 1)

    @property
    def block_tiles(self) -> int:
        """Tiles of rows that one stored scale serves; 0 where each row has its own."""
        return self.group_size // TILE_ROWS if self.strategy == "block" else 0

    def groups(self, in_features: int) -> int:
        """Scales a row of ``in_features`` columns."""
        return -(-in_features // self.columns(in_features))

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type (as numpy calls it) and shape of each tensor that an [out, in] weight is stored as."""
        return stored_parts(self, out_features, in_features)

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Count the bytes of all parts of an [out, in] weight, padding included."""
        return sum(map(part_bytes, self.parts(out_features, in_features).values()))


def _presets() -> dict[str, Format]:
    integers = [
        Format(bits, symmetric, "group", group_size, activations)
        for bits in (2, 3, 4, 5, 6, 7, 8)
        for activations in (None, Activations())
        for symmetric in (True, False)
        for group_size in (32, 64, 128)
    ]
    integers += [
        Format(bits, symmetric, strategy, 0, activations)
        for bits in (4, 8)
        for activations in (None, Activations())
        for symmetric in (True, False)
        for strategy in ("channel", "tensor")
    ]
    names = [fmt.name for fmt in integers]
    floats = ("FP8_E4M3", "FP8_E5M2", "FP6_E3M2", "FP6_E2M3", "FP4_E2M1", "FP4_E1M2", "FP4_E3M0")
    names += [f"{name}{suffix}" for name in floats for suffix in ("_G32", "_G64", "_G128", "_C")]
    names += ["NF4_G32", "NF4_G64", "NF4_G128", "NVFP4", "MXFP4"]
    names += [f"MX{name}" for name in floats[:4]]
    names += [f"LUT{bits}{suffix}" for bits in (2, 3, 4) for suffix in ("", "_G128", "_S0.45")]
    names += ["W8A8_B128", "FP8_E4M3_B128", "FP8_E4M3_B128_AFP8_E4M3_AG128"]
    names += [f"BIP{bits}{side}_G128" for bits in range(1, 9) for side in ("A16", "A8")]
    names += [f"{grid}{side}_G128" for grid in ("BIP2", "BAL2") for side in ("A2", "A4")]
    names += ["BIP1A1_G128", "BAL1A16_G128", "BAL1A8_G128", "BAL2A16_G128", "BAL2A8_G128", "BIP4A4_G128"]
    names += ["W4A4_G128", "W6A6_G128", "W8A8_STATIC", "W4A8_G128_AG128", "W4A4_G128_AG128", "W4AFP8_E4M3_G128"]
    names += ["FP8_E4M3_AFP8_E4M3", "FP8_E4M3_AFP8_E4M3_STATIC", "FP8_E5M2_AFP8_E5M2", "FP4_E2M1_G128_AFP4_E2M1_STATIC"]
    names += ["MXFP4_AMXFP4", "MXFP6_E2M3_AMXFP6_E2M3", "MXFP8_E4M3_AMXFP8_E4M3", "NVFP4_ANVFP4"]
    return {fmt.name: fmt for fmt in map(Format.parse, names)}


FORMATS: Mapping[str, Format] = MappingProxyType(_presets())
"""The presets that ``compress list formats`` shows; :meth:`Format.parse` reads any other size as well."""
