"""Describe the values of codes before they are scaled, where these are not integers: small floats, and NormalFloat.

A float of ``1 + E + M`` bits is ``sign | exponent | mantissa`` with bias ``2 ** (E - 1) - 1`` and subnormals (OCP
Microscaling Formats 1.0, section 5.3).  All codes are finite but those of E4M3 (one NaN a sign) and E5M2 (as IEEE
754: infinity and NaN), which no weight ever gets: rounding is to nearest, ties to even, and saturates.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property

_FLOAT = re.compile(r"E([1-5])M([0-6])")
_NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4: Dettmers et al. 2023 (QLoRA, arXiv 2305.14314), appendix E."""


@dataclass(frozen=True)
class Element:
    """A set of values by code.

    Attributes:
        name: ``E2M1`` and the like, or ``NF4``.
        exponent_bits, mantissa_bits: of a float; 0 and 0 for a table.
    """

    name: str
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @classmethod
    def parse(cls, name: str) -> Element | None:
        """Return the element type of that name; None if there is none."""
        if name == "NF4":
            return cls(name)
        match = _FLOAT.fullmatch(name)
        if match is None:
            return None
        exponent_bits, mantissa_bits = map(int, match.groups())
        found = cls(name, exponent_bits, mantissa_bits)
        return found if 3 <= found.bits <= 8 else None

    @property
    def is_float(self) -> bool:
        """Whether it has an exponent, rather than a table."""
        return self.exponent_bits > 0

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits if self.is_float else 4

    @property
    def bias(self) -> int:
        """What a float's exponent field is above its exponent."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The value of each code, exactly; NaN where a code stands for nothing finite."""
        if not self.is_float:
            return _NORMAL_FLOAT
        half = 1 << (self.bits - 1)
        magnitudes = [self._magnitude(code) for code in range(half)]
        return (*magnitudes, *(-value for value in magnitudes))

    def _magnitude(self, code: int) -> float:
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        special = {"E4M3": code == 0x7F, "E5M2": exponent == 31}.get(self.name, False)
        if special:
            return math.nan
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return math.ldexp(fraction, 1 - self.bias)
        return math.ldexp(1 + fraction, exponent - self.bias)

    @cached_property
    def max_value(self) -> float:
        """The largest value."""
        return max(value for value in self.values if not math.isnan(value))

    @property
    def largest_exponent(self) -> int:
        """Of the largest value, as Microscaling's scales need it."""
        return math.frexp(self.max_value)[1] - 1

    @cached_property
    def rounding(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Codes by rising value, and the upper end of what rounds to each but the last; an end belongs to the lower.

        Where a tie goes to the higher code, since that is the even one, the end lies one float64 below.
        """
        finite = {value: code for code, value in reversed(list(enumerate(self.values))) if not math.isnan(value)}
        codes = [finite[value] for value in sorted(finite)]
        ends = []
        for low, high in itertools.pairwise(codes):
            middle = (self.values[low] + self.values[high]) / 2
            ends.append(math.nextafter(middle, -math.inf) if low % 2 else middle)
        return tuple(codes), tuple(ends)
