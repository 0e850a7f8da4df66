"""Read rows of packed caches: values of codes, scales of groups, and channels that are stored in another order."""

from __future__ import annotations

from math import gcd
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.attention.rows import Place, Row, Rows
from compressor.codegen.kernels.vector import ramp, splat_float, widen
from compressor.formats.cache import CacheFormat

_E4M3_HALF = 2.0**8  # E4M3's fields in float16's places are a number so much smaller


def lanes_of(width: int, fmt: CacheFormat) -> int:
    """Return the lanes of vectors that lie within one group, and within one half of a row of 4-bit codes."""
    lanes = gcd(16, width, fmt.span(width))
    return lanes if fmt.bits == 8 else gcd(lanes, fmt.code_bytes(width))


def typed(kind: str, lanes: int) -> str:
    """Return the type of a vector, or of one value."""
    return f"{kind}x{lanes}" if lanes > 1 else kind


def ints(value: int, lanes: int) -> Any:
    """Return a vector of one int32."""
    return widen(T.int32(value), lanes)


class PackedRows:
    """Rows of packed caches uint8 [B, Hkv, T, row_bytes]; see
    :class:`compressor.codegen.kernels.attention.rows.Rows`.
    """

    def __init__(self, keys: Any, values: Any, b: Any, kv: Any, width: int, fmt: CacheFormat) -> None:
        self.keys, self.values, self.b, self.kv, self.width, self.fmt = keys, values, b, kv, width, fmt
        self.lanes = lanes_of(width, fmt)

    def products(self, query: Place, row: Any) -> Any:
        """See :class:`Rows`."""
        total = None
        for group, channels in self._groups():
            value = splat_float(0, self.lanes)
            for d in channels:
                value = value + query[ramp(d, self.lanes)] * self._codes(self.keys, row, d)
            scaled = value * widen(self._scale(self.keys, row, group), self.lanes)
            total = scaled if total is None else total + scaled
        return total

    def emit_weighed(self, acc: Any, weight: Any, row: Any) -> None:
        """See :class:`Rows`."""
        for group, channels in self._groups():
            p = widen(weight * self._scale(self.values, row, group), self.lanes)
            for d in channels:
                at = ramp(d, self.lanes)
                T.buffer_store(acc, acc[at] + p * self._codes(self.values, row, d), [at])

    def emit_row(self, row: Any, out: Place) -> None:
        """Emit the stores of a row of the keys as float32, in the order of its places."""
        for group, channels in self._groups():
            scale = widen(self._scale(self.keys, row, group), self.lanes)
            for d in channels:
                out.emit_store(ramp(d, self.lanes), self._codes(self.keys, row, d) * scale)

    def _groups(self) -> list[tuple[int, range]]:
        """Each group with the first channels of its vectors."""
        span, width = self.fmt.span(self.width), self.width
        return [(g, range(g * span, min(width, (g + 1) * span), self.lanes)) for g in range(self.fmt.groups(width))]

    def _codes(self, rows: Any, row: Any, d: int) -> Any:
        """Values of the codes of channels from d, as float32; of E4M3 smaller by a power of two."""
        lanes, half = self.lanes, self.fmt.code_bytes(self.width)
        high = self.fmt.bits == 4 and d >= half
        octets = rows[self.b, self.kv, row, ramp(d - half if high else d, lanes)]
        if self.fmt.element is not None:
            code = T.Cast(typed("uint16", lanes), octets)
            sign = T.shift_left(T.bitwise_and(code, self._words(0x80)), self._words(8))
            rest = T.shift_left(T.bitwise_and(code, self._words(0x7F)), self._words(7))
            fields = T.reinterpret(T.bitwise_or(sign, rest), dtype=typed("float16", lanes))
            return T.Cast(typed("float32", lanes), fields)
        code = T.Cast(typed("int32", lanes), T.reinterpret(octets, dtype=typed("int8", lanes)))
        if self.fmt.bits == 4:
            code = code if high else T.shift_left(code, ints(28, lanes))
            code = T.shift_right(code, ints(4 if high else 28, lanes))  # arithmetic: the sign comes along
        return T.Cast(typed("float32", lanes), code)

    def _words(self, value: int) -> Any:
        return widen(T.uint16(value), self.lanes)

    def _scale(self, rows: Any, row: Any, group: int) -> Any:
        at = self.fmt.code_bytes(self.width) + self.fmt.scale_bytes * group
        if self.fmt.scale_type == "E8M0":
            bits = T.shift_left(T.Cast("int32", rows[self.b, self.kv, row, at]), T.int32(23))
            return T.reinterpret(bits, dtype="float32")
        half = T.reinterpret(rows[self.b, self.kv, row, T.ramp(at, 1, 2)], dtype="float16")
        scale = T.Cast("float32", half)
        return scale if self.fmt.element is None else scale * T.float32(_E4M3_HALF)


class PackedRow:
    """One query row over packed caches, whose channels may be stored in another order; see
    :class:`compressor.codegen.kernels.attention.rows.Row`.
    """

    def __init__(self, width: int, scale: float, softcap: float, has_sinks: bool) -> None:
        self.width, self.row = width, Row(width, scale, softcap, has_sinks)

    def emit(
        self,
        held: Rows,
        query: Place,
        result: Place,
        scores: Any,
        sink: Any,
        first: Any,
        count: Any,
        orders: tuple[Place, Place] | None = None,
    ) -> None:
        """Attend to ``count`` keys from ``first``.

        Args:
            orders: of the channels of keys and of values, int32 [D]; None where they are stored as they come.
        """
        own, found = (T.alloc_buffer((self.width,), "float32") for _ in range(2))
        if orders is None:
            self._copy(held.lanes, query, Place(own))
        else:
            with T.serial(0, self.width) as d:
                T.buffer_store(own, query[orders[0][d]], [d])
        self.row.emit(held, Place(own), Place(found), scores, sink, first, count)
        if orders is None:
            self._copy(held.lanes, Place(found), result)
        else:
            with T.serial(0, self.width) as d:
                result.emit_store(orders[1][d], found[d])

    def _copy(self, lanes: int, source: Place, result: Place) -> None:
        for d in range(0, self.width, lanes):
            result.emit_store(ramp(d, lanes), source[ramp(d, lanes)])
