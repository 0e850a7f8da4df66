"""Make caches of keys and values, and let them grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compressor_runtime.manifest import DENSE_CACHE, cache_heads


def grown_caches(
    device: Any, caches: list[Any], model: Mapping[str, Any], batch: int, capacity: int, stored: int
) -> list[Any]:
    """Return the keys of every layer, then the values, with more rows: float32 [B, Hkv, T, D], or packed rows.

    Args:
        device: a :class:`~compressor_runtime.device.host.Host` or a :class:`~compressor_runtime.device.gpu.Gpu`.
        caches: those so far, which are given up, so that at most one is held twice; none at first.
        model: facts of the manifest.
        stored: rows of each head that stay.
    """
    dtype = np.dtype(np.float32 if model["cache_format"] == DENSE_CACHE else np.uint8)
    heads = cache_heads(model)
    row_bytes = model["cache_bytes_per_token"] // max(1, 2 * sum(heads))
    found: list[Any] = []
    for index, count in enumerate(2 * heads):
        shape = (batch, count, capacity, row_bytes // dtype.itemsize)
        if caches:
            found.append(device.grown(caches[index], shape, dtype, stored))
            caches[index] = None
        else:
            found.append(device.zeros(shape, dtype))
    return found
