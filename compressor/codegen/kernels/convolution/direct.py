"""What the products of a convolution of single pixels read: the images, where these are bytes already."""

from __future__ import annotations

import math
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.convolution.feeds import RUN_BYTES, BandFeed, Geometry, has_nan


class DirectFeed:
    """The images themselves; attributes and methods are those of :class:`ImageFeed`."""

    runs = factors = 1

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.pitch = geometry, geometry.size[1]
        self.band = geometry.band(geometry.size[0], geometry.least_bands)
        self.pixel = self.step = self.run_bytes = geometry.channels

    @staticmethod
    def serves(geometry: Geometry) -> bool:
        """Whether outputs read one pixel each, all of them in turn, and pixels are words."""
        pairs = (geometry.kernel, geometry.stride, geometry.padding)
        return pairs == ((1, 1), (1, 1), (0, 0)) and geometry.channels % 4 == 0

    def column(self, _run: int, byte: int) -> int | None:
        """As :meth:`ImageFeed.column`."""
        return byte if byte < self.run_bytes else None

    def offset(self, run: Any) -> Any:
        """As :meth:`ImageFeed.offset`."""
        return 0

    def fill(self, factor: Any, x: Any, image: Any, first_row: Any, rows: Any, input_scale: Any) -> tuple[Any, Any]:
        """As :meth:`ImageFeed.fill`; nothing is written but the scale."""
        row_bytes = self.pitch * self.pixel
        base = (image * self.geometry.size[0] + first_row) * row_bytes
        is_broken = has_nan(x, base, rows * row_bytes, RUN_BYTES if row_bytes >= RUN_BYTES else 4)
        T.buffer_store(factor, T.if_then_else(is_broken, T.float32(math.nan), input_scale), [0])
        return x, base


Feed = BandFeed | DirectFeed
