"""Packed key-value caches: new rows are quantised, and attention reads the rows as they are stored.

The layout is that of :mod:`compressor.formats.cache`.  Codes and scales become floats in registers; a group's scale is
multiplied into the sum of its products with the query, and into its values' weight.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import INDEPENDENT_ROWS
from compressor.codegen.kernels.attention.cached import attend_causally
from compressor.codegen.kernels.attention.packed_rows import ints, lanes_of, typed
from compressor.codegen.kernels.attention.parameters import Parameters
from compressor.codegen.kernels.attention.prompt import PromptBlocks
from compressor.codegen.kernels.attention.rows import Place
from compressor.codegen.kernels.attention.single import Single, store_row
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import emit_tree, ramp, splat_float, widen
from compressor.formats.cache import CacheFormat

_INFINITE = 255 << 23  # the bits of float32's infinity; those of NaN are above
_E4M3_NORMAL = 121 << 23  # the bits of E4M3's smallest normal number, 2^-6, in float32


def pack_cache(kv_heads: int, width: int, fmt: CacheFormat, has_order: bool) -> tvm.tirx.PrimFunc:
    """TIR for :func:`compressor.ops.packed_cache.pack_cache`.

    Parameters of the result: x float32 [B, Hkv, S, D], order int32 [Hkv, D] (where there is one), out uint8
    [B, Hkv, S, row_bytes].
    """
    lanes, size = lanes_of(width, fmt), fmt.row_bytes(width)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        batch = T.int64()
        new = T.int64()
        x = T.meta_var(parameter((batch, kv_heads, new, width), "float32"))
        order = T.meta_var(parameter((kv_heads, width), "int32") if has_order else None)
        out = T.meta_var(parameter((batch, kv_heads, new, size), "uint8"))

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

    return kernel


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
    parameters = Parameters(heads, kv_heads, width, fmt)
    single = Single(parameters, scale, softcap, window, has_sinks, has_order=has_order)
    prompt = PromptBlocks(width, heads // kv_heads, scale, softcap)

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        batch = T.int64()
        new = T.int64()
        capacity = T.int64()
        held = T.meta_var(parameters.held(batch, new, new, batch, capacity))
        position = T.meta_var(parameter((new,), "int64"))
        further = T.meta_var(single.declare())
        out = T.meta_var(parameters.out(batch, new))

        for b, h, s in T.grid(batch, kv_heads, new):
            store_row(held, b, h, s, b, position[0] + s)
        if new <= INDEPENDENT_ROWS:
            for task in T.parallel(batch * new * heads):
                h = T.meta_var(task % heads)
                s = T.meta_var(task // heads % new)
                b = T.meta_var(task // heads // new)
                single.attend(held, further, out, (b, h, s), b, position[0] + s + 1)
        else:
            attend_causally(single, prompt, held, further, out, position, batch, new)

    return kernel


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
                low = T.bitwise_and(octets, ints(15, lanes))
                octets = T.bitwise_or(low, T.shift_left(codes[ramp(padded // 2 + j, lanes)], ints(4, lanes)))
            out.emit_store(ramp(j, lanes), T.Cast(typed("uint8", lanes), octets))

    def size(self, d: Any) -> Any:
        """Return the bits of channels from d without their signs, int32."""
        bits = T.reinterpret(self.row[ramp(d, self.lanes)], dtype=typed("int32", self.lanes))
        return T.bitwise_and(bits, ints(0x7FFFFFFF, self.lanes))

    def _top(self, channels: range) -> Any:
        lanes = self.lanes
        tops = T.alloc_buffer((lanes,), "int32")
        T.buffer_store(tops, ints(0, lanes), [ramp(0, lanes)])
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
            return T.Cast(typed("int32", lanes), T.nearbyint(kept))
        bits = T.reinterpret(kept, dtype=typed("int32", lanes))
        size, sign = T.bitwise_and(bits, ints(0x7FFFFFFF, lanes)), T.shift_right(bits, ints(24, lanes))
        odd = T.bitwise_and(T.shift_right(size, ints(20, lanes)), ints(1, lanes))
        normal = T.shift_right(size + odd + ints(0x7FFFF, lanes), ints(20, lanes)) - ints(120 << 3, lanes)
        tiny = T.reinterpret(size, dtype=typed("float32", lanes)) * splat_float(2.0**9, lanes)
        small = T.Cast(typed("int32", lanes), T.nearbyint(tiny))
        code = T.Select(size < ints(_E4M3_NORMAL, lanes), small, normal)
        return T.bitwise_or(T.bitwise_and(sign, ints(0x80, lanes)), code)
