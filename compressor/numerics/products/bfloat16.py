"""Let oneDNN run float32 GEMMs in bfloat16 (AMX) during calibration, where full precision is not needed.

On a CPU with AMX, oneDNN rounds both factors to bfloat16, multiplies, and sums in float32, about three times as quickly
as in float32.  A product is then off by 2e-3 of its size; everything between products stays float32.  The rounding to
nearest of 4 bits is off by 5e-2 or more, so what it is calibrated on may be off by that much: :func:`is_coarse`.
docs/decisions/0029-bfloat16-calibration.md has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from compressor.formats.format import Format
from compressor.host.machine import host_flags

_COARSE_BITS = 4


def is_coarse(formats: Iterable[Format]) -> bool:
    """Return whether each of the formats rounds weights far more coarsely than bfloat16 does."""
    return all(fmt.bits <= _COARSE_BITS for fmt in formats)


@contextmanager
def bfloat16_products(wanted: bool = True) -> Iterator[None]:
    """Round the factors of float32 matrix products to bfloat16 inside, if that is wanted and the CPU has AMX.

    Bits do not depend on the number of threads.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if wanted and _has_amx():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@functools.cache
def _has_amx() -> bool:
    # oneDNN leaves float32 products as they are on CPUs with no more than avx512_bf16.
    return "amx_bf16" in host_flags()
