"""Formats and errors for tests of kernels for browsers, on either engine."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from compressor.codegen.web.kernels.packed_linear import check_format
from compressor.errors import UsageError
from compressor.formats.format import FORMATS, Format

TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders


def served(name: str) -> bool:
    try:
        check_format(Format.parse(name))
    except UsageError:
        return False
    return True


SERVED = [name for name in FORMATS if served(name)]


def error(got: np.ndarray, expected: Tensor) -> float:
    return float(np.abs(got - expected.numpy()).max() / expected.abs().max())
