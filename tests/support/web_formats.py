"""Formats and errors for tests of kernels for browsers, on either engine."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from compressor.codegen.web.kernels.packed_linear import supports
from compressor.formats.format import FORMATS

TOLERANCE = 3e-6  # of the largest output; both sides round float32 sums in different orders


SERVED = [name for name, fmt in FORMATS.items() if not supports(fmt)]


def error(got: np.ndarray, expected: Tensor) -> float:
    return float(np.abs(got - expected.numpy()).max() / expected.abs().max())
