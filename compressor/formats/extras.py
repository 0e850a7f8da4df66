"""What a format stores beside the codes and scales of a weight, as data: one class for each kind.

Another kind is one more class in :data:`EXTRAS`, its tensors in :data:`compressor.formats.parts.PART_TABLE`, its
meaning in :mod:`compressor.formats.packing`, and a kernel that reads it.  ``conflict(fmt)`` says why it cannot be part
of a format (:class:`compressor.formats.format.Format`); an empty text if it can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from compressor.errors import UsageError
from compressor.formats.planes import TwoPlanes, UpperPlane, is_plain


@dataclass(frozen=True)
class Outliers:
    """Single weights in float16, added to what the codes stand for (SqueezeLLM's dense-and-sparse decomposition).

    Attributes:
        percent: of the weights, above 0 and at most 10.
    """

    percent: float
    label: ClassVar[str] = "outliers"
    pattern: ClassVar[str] = r"_S(\d{1,2}(?:\.\d{1,3})?)"

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 10:
            raise UsageError(f"format: {self.percent:g}% of outliers; at most 10 pay")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_S{self.percent:g}"

    @property
    def text(self) -> str:
        """Describe what is stored."""
        return f"{self.percent:g}% of the weights, float16"

    def conflict(self, fmt: Any) -> str:
        """Stand beside anything."""
        return ""

    @classmethod
    def read(cls, text: str) -> Outliers | None:
        """Return the extra that the group of ``pattern`` names; None where it says that there is nothing."""
        return cls(float(text)) if float(text) else None


@dataclass(frozen=True)
class OutlierFeatures:
    """Whole input columns in float16, which the codes leave out (LLM.int8()).

    Attributes:
        count: columns, 1 or more.
    """

    count: int
    label: ClassVar[str] = "columns"
    pattern: ClassVar[str] = r"_F(\d{1,5})"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"format: {self.count} columns in float16; leave them out, or take one or more")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_F{self.count}"

    @property
    def text(self) -> str:
        """Describe what is stored."""
        return f"{self.count} of the inputs, float16"

    def conflict(self, fmt: Any) -> str:
        """Stand beside integers only."""
        return "stands beside integers" if fmt.codebook or fmt.element is not None else ""

    @classmethod
    def read(cls, text: str) -> OutlierFeatures | None:
        """Return the extra that the group of ``pattern`` names; None where it says that there is nothing."""
        return cls(int(text)) if int(text) else None


@dataclass(frozen=True)
class ColumnBlocks:
    """Blocks of 16 rows by one column, 32 by four or 32 by 64, of which many are zero and not stored: the rows of a
    tile keep the same columns.

    Attributes:
        percent: of the blocks of each tile of 16 rows that are zero, above 0 and below 100.
        width: columns of a block: 1; 4 neighbours, the operand of one dot product, which is what convolutions skip; or
            64, a row of a register of AMX, which linears skip there.
    """

    percent: float
    width: Literal[1, 4, 64] = 1
    label: ClassVar[str] = "sparsity"
    pattern: ClassVar[str] = r"_B((?:16X1|32X4|32X64)@\d{1,3}(?:\.\d{1,2})?)"

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise UsageError(
                f"format: {self.percent:g}% of the blocks of {self.shape} are zero; give more than 0, below 100"
            )

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows that a block has: a pair of them shares the activations that a register of them meets."""
        return 1 if self.width == 1 else 2

    @property
    def is_of_images(self) -> bool:
        """True for blocks of convolutions."""
        return self.width == 4

    @property
    def shape(self) -> str:
        """Rows by columns."""
        return f"{16 * self.tiles}x{self.width}"

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_B{self.shape}@{self.percent:g}"

    @property
    def text(self) -> str:
        """Describe what is left out."""
        shape = f"{16 * self.tiles} rows by {self.width} column{'s' if self.width > 1 else ''}"
        return f"{self.percent:g}% of the blocks of {shape} are zero and not stored; a bit for each"

    @classmethod
    def read(cls, text: str) -> ColumnBlocks | None:
        """Return the extra that the group of ``pattern`` names."""
        shape, _, percent = text.partition("@")
        widths: dict[str, Literal[1, 4, 64]] = {"16X1": 1, "32X4": 4, "32X64": 64}
        return cls(float(percent), widths[shape])

    def conflict(self, fmt: Any) -> str:
        """Leave out columns of a format whose parts are of rows and columns."""
        act = fmt.activations
        is_static = act is not None and act.granularity == "tensor" and fmt.integer_products and not act.is_sign
        if self.is_of_images and not (is_static and fmt.symmetric):
            return "is of convolutions: symmetric integers, and integer activations with a calibrated scale (_STATIC)"
        grouped = fmt.activations is not None and fmt.activations.group_size
        wrong = {
            "floats beside the codes": len(fmt.extras) > 1,
            "bit planes": fmt.bit_planes is not None,
            "scales of blocks or of the tensor": fmt.strategy in ("block", "tensor"),
            "scales of groups": self.is_of_images and fmt.strategy == "group",
            "E4M3 scales": fmt.scale_type == "E4M3",
            "activations in groups": bool(grouped),
        }
        found = next((what for what, is_there in wrong.items() if is_there), "")
        return found and f"leaves columns out, and cannot have {found}"

    def kept(self, in_features: int, multiple: int) -> int:
        """Count the columns that a tile keeps, rounded up to a multiple (of a chunk) as far as there are as many.

        The last block may reach beyond the last column: what fills it up is zero, and counts as a column.
        """
        blocks = self.blocks(in_features)
        left = self.width * max(1, blocks - round(self.percent / 100 * blocks))
        return min(blocks * self.width, -(-left // multiple) * multiple)

    def blocks(self, in_features: int) -> int:
        """Count the blocks of a tile, those that are left out as well."""
        return -(-in_features // self.width)


@dataclass(frozen=True)
class KeptOfGroup:
    """N weights of every M neighbours of a row are stored, the others are zero; which ones is a number a group.

    Attributes:
        kept: N, 1 or more.
        size: M, more than N and at most 16.
    """

    kept: int
    size: int
    label: ClassVar[str] = "sparsity"
    pattern: ClassVar[str] = r"_(\d{1,3}:\d{1,3})"

    def __post_init__(self) -> None:
        if not 1 <= self.kept < self.size:
            raise UsageError(
                f"format: {self.kept}:{self.size} keeps {self.kept} of every {self.size} weights; keep at least 1, and "
                "fewer than all"
            )
        if self.size > 16 or self.choices > 256:
            raise UsageError(
                f"format: {self.kept}:{self.size}: groups are of at most 16 weights and 256 choices; take 2:4 or 4:8"
            )

    @property
    def choices(self) -> int:
        """Ways to keep N of M."""
        return math.comb(self.size, self.kept)

    @property
    def index_bits(self) -> int:
        """Bits of a group's number."""
        return (self.choices - 1).bit_length()

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_{self.kept}:{self.size}"

    @property
    def text(self) -> str:
        """Describe what is left out."""
        return f"{self.kept} of every {self.size} weights of a row are stored; {self.index_bits} bits say which"

    @classmethod
    def read(cls, text: str) -> KeptOfGroup | None:
        """Return the extra that the group of ``pattern`` names."""
        kept, _, size = text.partition(":")
        return cls(int(kept), int(size))

    def conflict(self, fmt: Any) -> str:
        """Stand with symmetric integers of whole or half bytes and activations as they come."""
        if why := _other_than_plain_integers(fmt, "takes"):
            return why
        if fmt.strategy not in ("channel", "group"):
            return "has scales of groups or channels"
        if fmt.group_size % self.kept:
            return f"has scales of {fmt.group_size} stored weights, which cut groups of {self.kept} apart"
        return "stands with no other extra" if len(fmt.extras) > 1 else ""

    def stored(self, columns: int) -> int:
        """Count the weights of a row that are stored.

        Raises:
            UsageError: groups do not fill the row.
        """
        if columns % self.size:
            raise UsageError(f"{self.suffix[1:]}: rows of {columns} weights do not divide into groups of {self.size}")
        return columns // self.size * self.kept


@dataclass(frozen=True)
class SingleZeros:
    """Single weights, anywhere in the matrix, are zero and not stored; scales are those of the dense format.

    Attributes:
        percent: of the weights of a matrix that are zero, above 0 and below 100.
    """

    percent: float
    label: ClassVar[str] = "sparsity"
    pattern: ClassVar[str] = r"_B1X1@(\d{1,3}(?:\.\d{1,2})?)"

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise UsageError(f"format: {self.percent:g}% of the weights are zero; give more than 0, below 100")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_B1x1@{self.percent:g}"

    @property
    def text(self) -> str:
        """Describe what is left out."""
        return f"{self.percent:g}% of the weights are zero and not stored; a bit for each"

    @classmethod
    def read(cls, text: str) -> SingleZeros | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls(float(text))

    def conflict(self, fmt: Any) -> str:
        """Stand with codes one of which is zero."""
        if fmt.codebook or fmt.bit_planes is not None:
            return "leaves weights out, and needs codes one of which is zero: integers or floats"
        return "stands with no other extra" if len(fmt.extras) > 1 else ""

    def kept(self, out_features: int, in_features: int) -> int:
        """Count the weights of a matrix that are stored, one at least."""
        weights = out_features * in_features
        return max(1, weights - round(self.percent / 100 * weights))


@dataclass(frozen=True)
class SkippedInputs:
    """Thresholds of the inputs: what is smaller counts as zero, and the codes of its column are not read.

    Codes lie column by column, in panels (:func:`compressor.formats.parts.panel_rows`).
    """

    label: ClassVar[str] = "inputs"
    pattern: ClassVar[str] = r"(_SKIP)"
    suffix: ClassVar[str] = "_SKIP"
    text: ClassVar[str] = "below a stored threshold they count as zero, and codes are not read"

    @classmethod
    def read(cls, text: str) -> SkippedInputs | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls()

    def conflict(self, fmt: Any) -> str:
        """Stand with symmetric integers of whole or half bytes and activations as they come."""
        if why := _other_than_plain_integers(fmt, "compares"):
            return why
        if fmt.strategy == "block":
            return "has scales of groups, channels or the tensor"
        return "stands with no other extra" if len(fmt.extras) > 1 else ""


def _other_than_plain_integers(fmt: Any, verb: str) -> str:
    """Say what a format has beside plain integers and activations as they come; ``verb`` is what is done with these."""
    if not is_plain(fmt, 4, 8):
        return "stands with symmetric integers of 4 or 8 bits"
    return f"{verb} activations as they come (A16)" if fmt.activations is not None else ""


Extra: TypeAlias = (
    Outliers | OutlierFeatures | ColumnBlocks | KeptOfGroup | SingleZeros | SkippedInputs | TwoPlanes | UpperPlane
)
EXTRAS: tuple[type[Extra], ...] = get_args(Extra)
"""All kinds, in the order of their suffixes in a name."""
