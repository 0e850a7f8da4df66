"""How a packed linear takes its activations, as data; :mod:`compressor.numerics.input_scales` says what it computes.

Names follow the field.  Of the numbers: ``8`` (int8; 1 to 8 bits), ``FP8_E4M3`` (``FP8`` for short), ``MXFP4``,
``NVFP4``.  Of the scales: one a token, taken from the token itself, without a suffix; one for every ``<size>`` columns
of a token with ``_AG<size>``; one for the whole tensor, calibrated and stored, with ``_STATIC``.  There is no dynamic
scale for the whole tensor: it would make the entries of a batch depend on each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from compressor.errors import UsageError
from compressor.formats.elements import Element

Granularity = Literal["token", "group", "tensor"]
ActivationScale = Literal["F32", "E8M0", "E4M3"]

SHORT: Mapping[str, str] = MappingProxyType(
    {"FP4": "FP4_E2M1", "FP6": "FP6_E3M2", "FP8": "FP8_E4M3", "MXFP4": "MXFP4_E2M1"}
)
"""Names without an element, of weights and of activations, and what they stand for."""
NUMBERS = r"\d{1,3}|(?:MX)?FP\d(?:_E\dM\d)?|NVFP4"
SCALES = r"_STATIC|_AG\d{1,9}"
GROUP_STEP = 16
"""Columns that a kernel rounds at once."""
_FLOAT = re.compile(r"(?P<mx>MX)?FP(?P<bits>\d)_(?P<element>E\dM\d)", re.ASCII)
_BLOCKS: Mapping[ActivationScale, int] = MappingProxyType({"E8M0": 32, "E4M3": 16})


@dataclass(frozen=True)
class Activations:
    """Numbers and scales of a linear's input; symmetric, rounded to nearest, ties to even, and saturating.

    Attributes:
        bits: of a number; integers use ``-(2 ** (bits - 1) - 1)`` to ``2 ** (bits - 1) - 1``; of 1 bit, -1 and 1.
        element: of floats; None for integers.  A mantissa bit is needed: without one, a tie's even neighbour is not the
            one that rounding a quotient to an integer finds.
        granularity: one scale a ``token`` or ``group`` of its columns, from the largest of them while running (from
            their mean size, of 1 bit: Rastegari et al. 2016, XNOR-Net, arXiv 1603.05279, eq. 6); or one for the
            ``tensor``, from calibration.
        group_size: columns a group, a multiple of 16; 0 unless the granularity is ``group``.  The last may be shorter.
        scale_type: ``F32``; ``E8M0`` (Microscaling); ``E4M3`` (NVFP4, with one calibrated float32 for the tensor).
    """

    bits: int = 8
    element: Element | None = None
    granularity: Granularity = "token"
    group_size: int = 0
    scale_type: ActivationScale = "F32"

    def __post_init__(self) -> None:
        if self.element is None and not 1 <= self.bits <= 8:
            raise UsageError(f"format: A{self.bits}; activations are 16 (float), integers of 1 to 8 bits, or floats")
        if self.element is not None and (self.bits != self.element.bits or not self.element.mantissa_bits):
            raise UsageError(f"format: activations cannot be {self.element.name}: floats have a mantissa bit or more")
        if (self.granularity == "group") != (self.group_size > 0) or self.group_size % GROUP_STEP:
            raise UsageError(f"format: groups of {self.group_size} activations; use a multiple of {GROUP_STEP}")
        if self.scale_type != "F32" and (self.element is None or self.group_size != _BLOCKS[self.scale_type]):
            raise UsageError(
                f"format: {self.scale_type} scales are of floats, one for {_BLOCKS[self.scale_type]} columns"
            )

    @property
    def max_value(self) -> float:
        """The largest number."""
        return float(max(1, 2 ** (self.bits - 1) - 1)) if self.element is None else self.element.max_value

    @property
    def is_sign(self) -> bool:
        """Whether only signs are left, of which the mean size is the best scale."""
        return self.bits == 1

    @property
    def calibrated(self) -> bool:
        """Whether a scale is stored: the part ``input_scale``, float32 [1]."""
        return self.granularity == "tensor" or self.scale_type == "E4M3"

    @property
    def numbers(self) -> str:
        """What follows ``A`` in a format's name."""
        if self.scale_type == "E4M3":
            return "NVFP4"
        if self.element is None:
            return str(self.bits)
        name = f"FP{self.bits}_{self.element.name}"
        return name if self.scale_type == "F32" else "MXFP4" if name == "FP4_E2M1" else f"MX{name}"

    @property
    def scales(self) -> str:
        """What ends a format's name."""
        if self.scale_type != "F32" or self.granularity == "token":
            return ""
        return "_STATIC" if self.granularity == "tensor" else f"_AG{self.group_size}"

    @classmethod
    def parse(cls, numbers: str, scales: str | None) -> Activations | None:
        """Read what :attr:`numbers` and :attr:`scales` write; None for ``16``, floats as they are.

        Raises:
            UsageError: there are no such activations.
        """
        fixed = {"16": "they are floats as they come", "NVFP4": "its blocks have 16 columns"}.get(numbers)
        size = int(scales[3:]) if scales and scales.startswith("_AG") else 0
        granularity: Granularity = "tensor" if scales == "_STATIC" else "group" if scales else "token"
        match = _FLOAT.fullmatch(SHORT.get(numbers, numbers))
        element = Element.parse(match["element"]) if match is not None else None
        if match is not None and match["mx"]:
            fixed = "its blocks have 32 columns"
        if scales and fixed:
            raise UsageError(f"format: activations A{numbers} take no {scales[1:]}: {fixed}")
        if numbers == "16":
            return None
        if numbers == "NVFP4":
            return cls(4, Element.parse("E2M1"), "group", _BLOCKS["E4M3"], "E4M3")
        if match is None and numbers.isdigit():
            return cls(int(numbers), None, granularity, size)
        if match is None or element is None or match["bits"] != str(element.bits):
            raise UsageError(
                f"format: activations A{numbers} are unknown; A8, AFP8_E4M3, AMXFP4 or ANVFP4, for example"
            )
        if match["mx"]:
            return cls(element.bits, element, "group", _BLOCKS["E8M0"], "E8M0")
        return cls(element.bits, element, granularity, size)
