"""Read packed caches in blocks: each block of keys is unpacked once for a block of queries."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.attention.packed_rows import PackedRows
from compressor.codegen.kernels.attention.prompt import BEFORE, KEYS
from compressor.codegen.kernels.attention.rows import Place
from compressor.formats.cache import CacheFormat


class PackedHeads:
    """Keys or values of packed caches, whose channels come in their own order; see
    :class:`compressor.codegen.kernels.attention.prompt.Channels`.

    Args:
        rows: buffer uint8 [B, Hkv, T, row_bytes].
        width: of a head.
        order: buffer int32 [Hkv, D], the channel at each place of a row; None for channels as they come.
    """

    def __init__(self, rows: Any, width: int, fmt: CacheFormat, order: Any) -> None:
        self._rows, self._width, self._fmt, self._order = rows, width, fmt, order
        self._floats = T.alloc_buffer((BEFORE + KEYS, width), "float32")
        # A row in the order of its places.
        self._row: Any = None if order is None else T.alloc_buffer((width,), "float32")
        self._first: Any = None

    def at(self, b: Any, head: Any, token: Any, channels: Any) -> Any:
        """Load some channels of a row of the block."""
        return self._floats[token - self._first + BEFORE, channels]

    def ask(self, b: Any, head: Any, token: Any) -> None:
        """Do nothing: the block is in the caches."""

    def load(self, b: Any, head: Any, first: Any, count: Any) -> None:
        """Unpack a block."""
        self._first = first
        packed = PackedRows(self._rows, self._rows, b, head, self._width, self._fmt)
        with T.serial(0, count + BEFORE) as j, T.If(first + j >= BEFORE), T.Then():
            token = first + j - BEFORE
            if self._order is None:
                packed.emit_row(token, Place(self._floats, j))
            else:
                packed.emit_row(token, Place(self._row))
                with T.serial(0, self._width) as d:
                    T.buffer_store(self._floats, self._row[d], [j, self._order[head, d]])
