"""Packed key-value caches: new rows are quantised, and attention reads the rows as they are stored.

The layout is that of :mod:`compressor.formats.cache`.  Codes and scales become floats in registers; a group's scale is
multiplied into the sum of its products with the query, and into its values' weight.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.attention.cached import Place, Row, Rows
from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR, emit_tree, ramp, splat_float, widen
from compressor.formats.cache import CacheFormat

_INFINITE = 255 << 23  # the bits of float32's infinity; those of NaN are above
_E4M3_NORMAL = 121 << 23  # the bits of E4M3's smallest normal number, 2^-6, in float32
_E4M3_HALF = 2.0**8  # E4M3's fields in float16's places are a number so much smaller


def pack_cache(kv_heads: int, width: int, fmt: CacheFormat, has_order: bool) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.packed_cache.pack_cache`.

    Parameters of the result: x float32 [B, Hkv, S, D], order int32 [Hkv, D] (where there is one), out uint8
    [B, Hkv, S, row_bytes].
    """
    lanes, size = _lanes(width, fmt), fmt.row_bytes(width)

    @T.prim_func(s_tir=True, private=True)
    def kernel(x_: T.handle, order_: T.handle, out_: T.handle) -> None:
        batch = T.int64()
        new = T.int64()
        x = T.match_buffer(x_, (batch, kv_heads, new, width), "float32")
        order = T.meta_var(T.match_buffer(order_, (kv_heads, width), "int32") if has_order else None)
        out = T.match_buffer(out_, (batch, kv_heads, new, size), "uint8")

        @T.inline
        def pack(task):
            s = T.meta_var(task % new)
            h = T.meta_var(task // new % kv_heads)
            b = T.meta_var(task // new // kv_heads)
            row = T.alloc_buffer((width,), "float32")
            if has_order:
                for d in T.serial(width):
                    row[d] = x[b, h, s, order[h, d]]
            else:
                for d in range(0, width, lanes):
                    row[ramp(d, lanes)] = x[b, h, s, ramp(d, lanes)]
            Packer(width, fmt, row, lanes).emit(Place(out, b, h, s))

        with T.sblock("root"):  # of a function with one input, TVM wants to know whether it is a reshape
            if batch * new * kv_heads * width >= PARALLEL_FROM:
                for task in T.parallel(batch * new * kv_heads):
                    pack(task)
            else:
                for task in range(batch * new * kv_heads):
                    pack(task)

    return without(kernel, {1: has_order})


def packed_attention(
    heads: int,
    kv_heads: int,
    width: int,
    scale: float,
    window: int,
    softcap: float,
    has_sinks: bool,
    fmt: CacheFormat,
    has_order: bool,
) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.packed_cache.packed_attention`, which also stores the new rows.

    Parameters of the result: q float32 [B, H, S, D], k, v uint8 [B, Hkv, S, row_bytes], k_cache, v_cache uint8
    [B, Hkv, T, row_bytes] (written at ``position``), position int64 [S], sinks float32 [H] (where there are any),
    k_order, v_order int32 [Hkv, D] (where there are any), out float32 [B, S, H, D].
    """
    repeat, windowed, size = heads // kv_heads, window > 0, fmt.row_bytes(width)
    row = PackedRow(width, scale, softcap, has_sinks)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        q_: T.handle,
        k_: T.handle,
        v_: T.handle,
        k_cache_: T.handle,
        v_cache_: T.handle,
        position_: T.handle,
        sinks_: T.handle,
        k_order_: T.handle,
        v_order_: T.handle,
        out_: T.handle,
    ) -> None:
        batch = T.int64()
        new = T.int64()
        capacity = T.int64()
        q = T.match_buffer(q_, (batch, heads, new, width), "float32")
        k = T.match_buffer(k_, (batch, kv_heads, new, size), "uint8")
        v = T.match_buffer(v_, (batch, kv_heads, new, size), "uint8")
        k_cache = T.match_buffer(k_cache_, (batch, kv_heads, capacity, size), "uint8")
        v_cache = T.match_buffer(v_cache_, (batch, kv_heads, capacity, size), "uint8")
        position = T.match_buffer(position_, (new,), "int64")
        sinks = T.meta_var(T.match_buffer(sinks_, (heads,), "float32") if has_sinks else None)
        k_order = T.meta_var(T.match_buffer(k_order_, (kv_heads, width), "int32") if has_order else None)
        v_order = T.meta_var(T.match_buffer(v_order_, (kv_heads, width), "int32") if has_order else None)
        out = T.match_buffer(out_, (batch, new, heads, width), "float32")

        for b, h, s in T.grid(batch, kv_heads, new):
            for d in T.vectorized(size):
                k_cache[b, h, position[0] + s, d] = k[b, h, s, d]
            for d in T.vectorized(size):
                v_cache[b, h, position[0] + s, d] = v[b, h, s, d]
        for task in T.parallel(batch * new * heads):
            h = T.meta_var(task % heads)
            s = T.meta_var(task // heads % new)
            b = T.meta_var(task // heads // new)
            kv = T.meta_var(h // repeat)
            last = T.meta_var(position[0] + s + 1)
            first = T.meta_var(T.max(last - window, T.int64(0)) if windowed else T.int64(0))
            scores = T.alloc_buffer((last - first + VECTOR,), "float32")
            held = T.meta_var(PackedRows(k_cache, v_cache, b, kv, width, fmt))
            query, result = T.meta_var((Place(q, b, h, s), Place(out, b, s, h)))
            orders = T.meta_var((Place(k_order, kv), Place(v_order, kv)) if has_order else None)
            row.emit(held, query, result, orders, scores, sinks[h] if has_sinks else None, first, last - first)

    return without(kernel, {6: has_sinks, 7: has_order, 8: has_order})


def without(kernel: tvm.tirx.PrimFunc, present: dict[int, bool]) -> tvm.tirx.PrimFunc:
    """Remove the parameters that a function does not use."""
    params = [param for i, param in enumerate(kernel.params) if present.get(i, True)]
    return tvm.tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs)


def _lanes(width: int, fmt: CacheFormat) -> int:
    """Lanes of vectors that lie within one group, and within one half of a row of 4-bit codes."""
    lanes = gcd(16, width, fmt.span(width))
    return lanes if fmt.bits == 8 else gcd(lanes, fmt.code_bytes(width))


def _typed(kind: str, lanes: int) -> str:
    return f"{kind}x{lanes}" if lanes > 1 else kind


def _ints(value: int, lanes: int) -> Any:
    return widen(T.int32(value), lanes)


class PackedRows:
    """Rows of packed caches uint8 [B, Hkv, T, row_bytes]; see
    :class:`compressor.codegen.kernels.attention.cached.Rows`.
    """

    def __init__(self, keys: Any, values: Any, b: Any, kv: Any, width: int, fmt: CacheFormat) -> None:
        self.keys, self.values, self.b, self.kv, self.width, self.fmt = keys, values, b, kv, width, fmt
        self.lanes = _lanes(width, fmt)

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
            code = T.Cast(_typed("uint16", lanes), octets)
            sign = T.shift_left(T.bitwise_and(code, self._words(0x80)), self._words(8))
            rest = T.shift_left(T.bitwise_and(code, self._words(0x7F)), self._words(7))
            fields = T.reinterpret(T.bitwise_or(sign, rest), dtype=_typed("float16", lanes))
            return T.Cast(_typed("float32", lanes), fields)
        code = T.Cast(_typed("int32", lanes), T.reinterpret(octets, dtype=_typed("int8", lanes)))
        if self.fmt.bits == 4:
            code = code if high else T.shift_left(code, _ints(28, lanes))
            code = T.shift_right(code, _ints(4 if high else 28, lanes))  # arithmetic: the sign comes along
        return T.Cast(_typed("float32", lanes), code)

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
    :class:`compressor.codegen.kernels.attention.cached.Row`.
    """

    def __init__(self, width: int, scale: float, softcap: float, has_sinks: bool) -> None:
        self.width, self.row = width, Row(width, scale, softcap, has_sinks)

    def emit(
        self,
        held: Rows,
        query: Place,
        result: Place,
        orders: tuple[Place, Place] | None,
        scores: Any,
        sink: Any,
        first: Any,
        count: Any,
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


class Packer:
    """One row that is being packed: scales from integers that order as the sizes of floats do, NaN above infinity.

    Args:
        row: buffer float32 [D].
        lanes: channels that are rounded at once; they divide a group.
    """

    def __init__(self, width: int, fmt: CacheFormat, row: Any, lanes: int = 1) -> None:
        self.width, self.fmt, self.row, self.lanes = width, fmt, row, lanes

    def emit(self, out: Place) -> None:
        """Emit the stores of all bytes."""
        fmt, width, lanes = self.fmt, self.width, self.lanes
        padded = width if fmt.bits == 8 else 2 * fmt.code_bytes(width)
        codes = T.alloc_buffer((padded,), "int32")
        divisor = T.alloc_buffer((1,), "float32")
        if padded > width:
            T.buffer_store(codes, T.int32(0), [width])
        for group in range(fmt.groups(width)):
            begin = group * fmt.span(width)
            channels = range(begin, min(width, begin + fmt.span(width)), lanes)
            self.emit_scale(self._top(channels), group, divisor, 0, out)
            for d in channels:
                T.buffer_store(codes, self.round(d, divisor[0]), [ramp(d, lanes)])
        for j in range(0, fmt.code_bytes(width), lanes):
            octets = codes[ramp(j, lanes)]
            if fmt.bits == 4:
                low = T.bitwise_and(octets, _ints(15, lanes))
                octets = T.bitwise_or(low, T.shift_left(codes[ramp(padded // 2 + j, lanes)], _ints(4, lanes)))
            out.emit_store(ramp(j, lanes), T.Cast(_typed("uint8", lanes), octets))

    def size(self, d: Any) -> Any:
        """Return the bits of channels from d without their signs, int32."""
        bits = T.reinterpret(self.row[ramp(d, self.lanes)], dtype=_typed("int32", self.lanes))
        return T.bitwise_and(bits, _ints(0x7FFFFFFF, self.lanes))

    def _top(self, channels: range) -> Any:
        lanes = self.lanes
        tops = T.alloc_buffer((lanes,), "int32")
        T.buffer_store(tops, _ints(0, lanes), [ramp(0, lanes)])
        for d in channels:
            T.buffer_store(tops, T.max(tops[ramp(0, lanes)], self.size(d)), [ramp(0, lanes)])
        emit_tree(T.max, tops, lanes)
        return tops[0]

    def emit_scale(self, top: Any, group: Any, divisor: Any, where: Any, out: Place) -> None:
        """Emit the stores of a group's scale, and of what its channels are divided by, at a place of ``divisor``.

        Args:
            top: the group's largest :meth:`size`.
        """
        fmt = self.fmt
        at = fmt.code_bytes(self.width) + fmt.scale_bytes * group
        if fmt.scale_type == "E8M0":
            exponent = T.alloc_buffer((1,), "int32", scope="local")
            usual = T.max(T.shift_right(top, T.int32(23)) - T.int32(fmt.bits - 2), T.int32(1))
            T.buffer_store(exponent, T.Select(top >= T.int32(_INFINITE), T.int32(255), usual), [0])
            out.emit_store(at, T.Cast("uint8", exponent[0]))
            value = T.reinterpret(T.shift_left(exponent[0], T.int32(23)), dtype="float32")
            T.buffer_store(divisor, value, [where])
            return
        half = T.alloc_buffer((1,), "float16", scope="local")
        scale = T.reinterpret(top, dtype="float32") / T.float32(fmt.max_value)
        finite = top < T.int32(_INFINITE)
        T.buffer_store(half, T.Cast("float16", T.Select(finite, T.min(scale, T.float32(65504)), scale)), [0])
        fields = T.reinterpret(half[0], dtype="uint16")
        out.emit_store(at, T.Cast("uint8", T.bitwise_and(fields, T.uint16(255))))
        out.emit_store(at + 1, T.Cast("uint8", T.shift_right(fields, T.uint16(8))))
        stored = T.Cast("float32", half[0])
        T.buffer_store(divisor, T.Select(stored > T.float32(0), stored, T.float32(1)), [where])

    def round(self, d: Any, divisor: Any) -> Any:
        """Return the codes of channels from d, int32, of which the lower bits count."""
        lanes, largest = self.lanes, splat_float(self.fmt.max_value, self.lanes)
        scaled = self.row[ramp(d, lanes)] / widen(divisor, lanes)
        kept = T.max(T.min(scaled, largest), splat_float(-self.fmt.max_value, lanes))
        if self.fmt.element is None:
            return T.Cast(_typed("int32", lanes), T.nearbyint(kept))
        bits = T.reinterpret(kept, dtype=_typed("int32", lanes))
        size, sign = T.bitwise_and(bits, _ints(0x7FFFFFFF, lanes)), T.shift_right(bits, _ints(24, lanes))
        odd = T.bitwise_and(T.shift_right(size, _ints(20, lanes)), _ints(1, lanes))
        normal = T.shift_right(size + odd + _ints(0x7FFFF, lanes), _ints(20, lanes)) - _ints(120 << 3, lanes)
        tiny = T.reinterpret(size, dtype=_typed("float32", lanes)) * splat_float(2.0**9, lanes)
        small = T.Cast(_typed("int32", lanes), T.nearbyint(tiny))
        code = T.Select(size < _ints(_E4M3_NORMAL, lanes), small, normal)
        return T.bitwise_or(T.bitwise_and(sign, _ints(0x80, lanes)), code)
