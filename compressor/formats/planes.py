"""Codes of 8 bits in two planes of four, of which either both are read or the upper one alone, as data.

The upper four bits of a code number 16 neighbouring values.  Their middle is what the upper plane alone stands for::

    code = 16 * upper + lower
    value = (code - 128) * scale    and of the upper plane alone    (upper - 7.5) * 16 * scale

so that one stored weight has two precisions, and the coarser one reads half of the bytes of its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

_CODE_BITS = 8


@dataclass(frozen=True)
class TwoPlanes:
    """Codes of 8 bits lie in two planes: the upper four bits of all, and apart from them the lower ones."""

    label: ClassVar[str] = "planes"
    pattern: ClassVar[str] = r"_(P4)"
    suffix: ClassVar[str] = "_P4"
    text: ClassVar[str] = "the upper 4 bits of the codes lie apart, and may be read alone"

    @classmethod
    def read(cls, text: str) -> TwoPlanes | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls()

    def conflict(self, fmt: Any) -> str:
        """Stand with symmetric integers of 8 bits."""
        if not is_plain(fmt, _CODE_BITS):
            return "cuts symmetric integers of 8 bits in two"
        return "stands with no other extra" if len(fmt.extras) > 1 else ""


@dataclass(frozen=True)
class UpperPlane:
    """Codes are the upper half of those of 8 bits: no format to store a weight in, but what is read of one."""

    label: ClassVar[str] = "part of"
    pattern: ClassVar[str] = r"_(OF8)"
    suffix: ClassVar[str] = "_OF8"
    text: ClassVar[str] = "the upper plane of codes of 8 bits, with their scales"

    @classmethod
    def read(cls, text: str) -> UpperPlane | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls()

    def conflict(self, fmt: Any) -> str:
        """Stand with symmetric integers of 4 bits."""
        if not is_plain(fmt, _CODE_BITS // 2):
            return "is of symmetric integers of 4 bits"
        return "stands with no other extra" if len(fmt.extras) > 1 else ""


def is_plain(fmt: Any, *bits: int) -> bool:
    """Return whether a format has symmetric integers of one of these numbers of bits."""
    is_integer = fmt.element is None and not fmt.codebook and fmt.bit_planes is None
    return is_integer and fmt.symmetric and fmt.bits in bits
