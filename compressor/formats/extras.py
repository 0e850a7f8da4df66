"""What a format stores beside the codes and scales of a weight, as data: one class for each kind.

Another kind is one more class in :data:`EXTRAS`, its tensors in :data:`compressor.formats.parts.PART_TABLE`, its
meaning in :mod:`compressor.formats.packing`, and a kernel that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from compressor.errors import UsageError


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
        """What it stores, in words."""
        return f"{self.percent:g}% of the weights, float16"

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
        """What it stores, in words."""
        return f"{self.count} of the inputs, float16"

    @classmethod
    def read(cls, text: str) -> OutlierFeatures | None:
        """Return the extra that the group of ``pattern`` names; None where it says that there is nothing."""
        return cls(int(text)) if int(text) else None


@dataclass(frozen=True)
class ColumnBlocks:
    """Blocks of 16 rows by one column, most of which are zero and not stored: the rows of a tile keep the same columns.

    Attributes:
        percent: of the columns of each tile of 16 rows that are zero, above 0 and below 100.
    """

    percent: float
    label: ClassVar[str] = "sparsity"
    pattern: ClassVar[str] = r"_B16X1@(\d{1,3}(?:\.\d{1,2})?)"

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise UsageError(f"format: {self.percent:g}% of the blocks of 16x1 are zero; give more than 0, below 100")

    @property
    def suffix(self) -> str:
        """End of a format's name."""
        return f"_B16x1@{self.percent:g}"

    @property
    def text(self) -> str:
        """What it leaves out, in words."""
        return f"{self.percent:g}% of the blocks of 16 rows by 1 column are zero and not stored; a bit for each"

    @classmethod
    def read(cls, text: str) -> ColumnBlocks | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls(float(text))

    def kept(self, in_features: int, multiple: int) -> int:
        """Count the columns that a tile keeps, rounded up to a multiple (of a chunk) as far as there are as many."""
        left = max(1, in_features - round(self.percent / 100 * in_features))
        return min(in_features, -(-left // multiple) * multiple)


Extra: TypeAlias = Outliers | OutlierFeatures | ColumnBlocks
EXTRAS: tuple[type[Extra], ...] = (Outliers, OutlierFeatures, ColumnBlocks)
"""All kinds, in the order of their suffixes in a name."""
