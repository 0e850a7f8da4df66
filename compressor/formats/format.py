"""Number formats as data.

A :class:`Format` says how the weights of a linear are stored and how its activations are rounded: what a code stands
for, granularity and type of the scales, and the same of the activations. Names follow the field: ``W4A16_G128``,
``W4A8_ASYM_G32``, ``W8A8`` (one scale a channel), ``W8A8_T`` (one a tensor), ``FP8_E4M3_B128`` (one a block of 128 rows
by 128 columns); ``FP6_E3M2_G128``, ``FP8_E4M3``, ``NF4_G64`` (floats and tables); ``MXFP4``, ``MXFP6_E2M3``,
``MXFP8_E4M3`` (OCP Microscaling 1.0: blocks of 32, E8M0 scales) and ``NVFP4`` (blocks of 16, E4M3 scales, one float32
scale a tensor); ``LUT3``, ``LUT4_G128`` (codebooks: non-uniform values of each row or group); ``BIP2A8_G128``,
``BIP1A16`` (1 to 8 bit planes: bipolar-INT, Ma et al. 2024, arXiv 2409.17870) and ``BAL2A8`` (bit planes of a balanced
grid: bit balance of ABQ-LLM, Zeng et al. 2024, arXiv 2408.08554). ``A16`` or nothing leaves activations as they are;
``A8`` and the like, ``W4AFP8_E4M3_G128``, ``MXFP4_AMXFP4``, ``W8A8_STATIC`` and ``W4A4_G128_AG128`` round them
(:mod:`compressor.formats.activations`). ``_S0.45`` at the end: 0.45% of the weights are stored as float16 beside the
codes (dense-and-sparse, Kim et al. 2023, SqueezeLLM, arXiv 2306.07629); ``_F8``: eight input columns are (Dettmers et
al. 2022, LLM.int8(), arXiv 2208.07339), in float as well. ``_B16x1@80``: 80% of the blocks of 16 rows by one column are
zero and not stored; ``_B32x4@30``: 30% of those of 32 by four, of a convolution; ``_B32x64@80``: 80% of those of 32 by
64, which AMX skips; ``_B1x1@70``: 70% of the single weights.  ``_2:4``: two of every four weights are kept.  ``_SKIP``:
small activations count as zero, and their codes are not read.  ``_P4``: the upper and lower four bits of codes of 8
lie apart; ``W4A8_C_OF8`` is the upper plane of ``W8A8_P4``.

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

What is stored as floats is added to what the codes stand for (:mod:`compressor.formats.outliers`).  Zeros that are not
stored, inputs that are skipped and codes in two planes have layouts of their own (:mod:`compressor.formats.layouts`).
Rows and columns that only fill up a tile or a chunk hold code 0 and scale 0 (of E8M0, which has no zero: byte 0).
FP6 is thereby stored as ZeroQuant(4+2) does (Wu et al. 2023, arXiv 2312.08583): a plane of 4 and a plane of 2 bits.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, TypeVar

from compressor.errors import UnknownFormatError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.formats.extras import EXTRAS, ColumnBlocks, Extra, KeptOfGroup, OutlierFeatures, Outliers, SingleZeros
from compressor.formats.names import PRESETS, Terms, read_name, write_name
from compressor.formats.parts import TILE_ROWS, part_bytes, stored_parts
from compressor.formats.planes import TwoPlanes, UpperPlane
from compressor.formats.weights import (
    BitPlanes,
    ChannelScales,
    Codebook,
    Floats,
    GroupScales,
    Integers,
    PlaneGrid,
    Scales,
    ScaleType,
    StandardScales,
    Strategy,
    Weights,
)

E = TypeVar("E", bound=Extra)


@dataclass(frozen=True)
class Format:
    """How one linear is stored and computed: the sum of what its codes are, their scales, its activations, and extras.

    Attributes:
        weights: what a code stands for.
        scales: one for the tensor, each channel, group or block; of which type.
        activations: what they are rounded to; None computes on floats as they come.
        extras: what is stored beside the codes, one of a kind, in the order of
            :data:`compressor.formats.extras.EXTRAS`.

    Raises:
        UsageError: the terms do not go together.
    """

    weights: Weights
    scales: Scales
    activations: Activations | None = None
    extras: tuple[Extra, ...] = ()

    example: ClassVar[str] = "W4A16_G128"

    def __post_init__(self) -> None:
        self._check_scales()
        self._check_activations()
        kinds = [type(extra) for extra in self.extras]
        if kinds != [kind for kind in EXTRAS if kind in kinds]:
            raise UsageError(f"format: extras {', '.join(kind.__name__ for kind in kinds)}; one of a kind, in order")
        for extra in self.extras:
            if wrong := extra.conflict(self):
                raise UsageError(f"format: {extra.suffix} {wrong}")

    def _check_scales(self) -> None:
        weights, scales = self.weights, self.scales
        if isinstance(weights, Codebook) and not isinstance(scales, ChannelScales | GroupScales):
            raise UsageError("format: codebooks are of channels or groups")
        if isinstance(scales, StandardScales) and not isinstance(weights, Floats):
            raise UsageError(f"format: {scales.type} scales are of floats, one for {scales.size} columns")
        if scales.size % self.chunk_columns:
            nearest = max(1, round(scales.size / self.chunk_columns)) * self.chunk_columns
            raise UsageError(
                f"format: group size {scales.size} of a {self.bits}-bit format is not a multiple of "
                f"{self.chunk_columns}, the columns of one packed chunk; use {nearest}"
            )

    def _check_activations(self) -> None:
        act = self.activations
        if act is None or act.element is not None:
            return
        if isinstance(self.weights, Codebook):
            raise UsageError("format: codebooks have 2 to 4 bits, and float activations")
        if isinstance(self.weights, Floats):
            raise UsageError(f"format: {self.weights.element.name} has {self.bits} bits, and float activations")
        if act.group_size:
            small, large = sorted((act.group_size, self.group_size or act.group_size))
            if large % small or act.group_size % self.chunk_columns:
                raise UsageError(
                    f"format: integer activations in groups of {act.group_size}, weights in groups of "
                    f"{self.group_size}; one must be a multiple of the other, and both of {self.chunk_columns}"
                )

    @property
    def name(self) -> str:
        """The canonical name; ``Format.parse(fmt.name) == fmt``."""
        return write_name(Terms(self.weights, self.scales, self.activations, self.extras))

    @classmethod
    def parse(cls, name: object) -> Format:
        """Read a name such as ``W4A16_G128``; without a suffix 8 bits mean one scale a channel, fewer ``_G128``.

        Raises:
            UsageError: the name is none; the nearest preset is named.
        """
        terms = read_name(name) if isinstance(name, str) else None
        if terms is not None:
            return cls(*terms)
        near = difflib.get_close_matches(str(name)[:80].upper(), list(FORMATS), n=1, cutoff=0.0)
        raise UnknownFormatError(
            f"format {name!r:.80} is unknown; a name is W<bits>A<bits>[_ASYM][_G<size>|_B<size>|_C|_T], "
            "BIP<bits>A<bits> or BAL<bits>A<bits>[_G<size>|_B<size>|_C|_T], FP<bits>_E<bits>M<bits>[_G<size>|_B<size>|"
            "_C|_T], NF4[_G<size>], LUT<bits>[_G<size>], MXFP<bits>_E<bits>M<bits>, MXFP4 or NVFP4, and may go on with "
            f"_A<activations>, _STATIC or _AG<size>, and _S<percent>, _B16x1@<percent> or _<N>:<M>; nearest: {near[0]}"
        )

    @property
    def without_outliers(self) -> Format:
        """The same without what is stored as floats."""
        return replace(self, extras=tuple(e for e in self.extras if not isinstance(e, Outliers | OutlierFeatures)))

    @property
    def of_kept(self) -> Format:
        """The format without what is left out: of the columns that a tile or a row keeps, or of all."""
        left_out = ColumnBlocks | KeptOfGroup | SingleZeros
        return replace(self, extras=tuple(e for e in self.extras if not isinstance(e, left_out)))

    @property
    def upper(self) -> Format:
        """The format of the upper plane alone, of codes that lie in two."""
        assert self.extra(TwoPlanes) is not None
        return replace(self, weights=Integers(self.bits // 2), extras=(UpperPlane(),))

    @property
    def factor(self) -> float:
        """By what stored scales are multiplied: 1, but for an upper plane, whose codes lie 16 of the whole apart."""
        return 1.0 if self.extra(UpperPlane) is None else float(1 << self.bits)

    def with_extra(self, extra: Extra) -> Format:
        """Return the same with this extra, in place of another of its kind."""
        extras = {**{type(one): one for one in self.extras}, type(extra): extra}
        return replace(self, extras=tuple(extras[kind] for kind in EXTRAS if kind in extras))

    def with_group_size(self, size: int) -> Format:
        """Return the same with one scale for every ``size`` columns of a row.

        Raises:
            UsageError: a standard fixes the size of the groups.
        """
        if isinstance(self.scales, StandardScales):
            if size == self.scales.size:
                return self
            raise UsageError(f"format: {self.scales.type} scales are of floats, one for {self.scales.size} columns")
        return replace(self, scales=GroupScales(size))

    def extra(self, kind: type[E]) -> E | None:
        """Return the extra of a kind; None where the format does not have it."""
        return next((one for one in self.extras if isinstance(one, kind)), None)

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return self.weights.bits

    @property
    def element(self) -> Element | None:
        """What a code stands for before it is scaled; None for integers and codebooks."""
        return self.weights.element if isinstance(self.weights, Floats) else None

    @property
    def symmetric(self) -> bool:
        """Whether no zero points are stored."""
        return not isinstance(self.weights, Integers) or self.weights.symmetric

    @property
    def codebook(self) -> bool:
        """Whether each row or group has values of its own in place of a scale."""
        return isinstance(self.weights, Codebook)

    @property
    def bit_planes(self) -> PlaneGrid | None:
        """The grid of codes in planes of one bit; None of other codes."""
        return self.weights.grid if isinstance(self.weights, BitPlanes) else None

    @property
    def strategy(self) -> Strategy:
        """What one scale serves."""
        return self.scales.strategy

    @property
    def group_size(self) -> int:
        """Columns a group, or rows and columns a block; otherwise 0."""
        return self.scales.size

    @property
    def scale_type(self) -> ScaleType:
        """Type in which scales are stored."""
        return self.scales.type

    @property
    def outlier_percent(self) -> float:
        """Percentage of the weights that are stored as float16."""
        found = self.extra(Outliers)
        return found.percent if found is not None else 0.0

    @property
    def outlier_features(self) -> int:
        """Input columns that are stored as float16."""
        found = self.extra(OutlierFeatures)
        return found.count if found is not None else 0

    def outliers(self, out_features: int, in_features: int) -> int:
        """Count the single weights of an [out, in] weight that are stored as float16."""
        rows = -(-out_features // TILE_ROWS) * TILE_ROWS
        return round(self.outlier_percent / 100 * rows * self.chunks(in_features) * self.chunk_columns)

    @property
    def levels(self) -> int:
        """Number of codes that are in use."""
        return self.weights.levels

    @property
    def zero_point(self) -> float:
        """Code of zero on a symmetric grid of integers: a whole number, and a half on bipolar grids."""
        if self.extra(UpperPlane) is not None:
            return (self.levels - 1) / 2
        if isinstance(self.weights, Integers | BitPlanes):
            return self.weights.zero_point
        return float(1 << (self.bits - 1))

    @property
    def zero_code(self) -> int:
        """Code of zero, where all codes share a zero point or have none."""
        return int(self.zero_point) if self.element is None else self.element.values.index(0.0)

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
        return self.weights.planes if self.extra(TwoPlanes) is None else (self.bits // 2, self.bits // 2)

    @property
    def chunk_columns(self) -> int:
        """Columns of one packed chunk."""
        return 32 // self.planes[-1]

    @property
    def chunk_words(self) -> int:
        """32-bit words a row and chunk."""
        return self.chunk_columns * self.bits // 32

    def stored_columns(self, in_features: int) -> int:
        """Columns of a row that are stored: those that its tile keeps, all where the format leaves none out."""
        if (pattern := self.extra(KeptOfGroup)) is not None:
            return pattern.stored(in_features)
        blocks = self.extra(ColumnBlocks)
        return in_features if blocks is None else blocks.kept(in_features, self.chunk_columns)

    def chunks(self, in_features: int) -> int:
        """Chunks a row of ``in_features`` columns."""
        return -(-self.stored_columns(in_features) // self.chunk_columns)

    def columns(self, in_features: int) -> int:
        """Columns a group, of those that are stored (the whole row without groups)."""
        return self.group_size or self.stored_columns(in_features)

    def grid_rows(self, out_features: int) -> int:
        """Neighbouring rows that share their grids."""
        return {"tensor": out_features, "block": self.group_size}.get(self.strategy, 1)

    @property
    def block_tiles(self) -> int:
        """Tiles of rows that one stored scale serves; 0 where each row has its own."""
        return self.group_size // TILE_ROWS if self.strategy == "block" else 0

    def groups(self, in_features: int) -> int:
        """Scales a row of ``in_features`` columns."""
        return -(-self.stored_columns(in_features) // self.columns(in_features))

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type (as numpy calls it) and shape of each tensor that an [out, in] weight is stored as."""
        return stored_parts(self, out_features, in_features)

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Count the bytes of all parts of an [out, in] weight, padding included."""
        return sum(map(part_bytes, self.parts(out_features, in_features).values()))


FORMATS: Mapping[str, Format] = MappingProxyType({fmt.name: fmt for fmt in map(Format.parse, PRESETS)})
"""The presets that ``compress list formats`` shows; :meth:`Format.parse` reads any other size as well."""
