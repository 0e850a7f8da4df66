"""A depthwise convolution in one kernel: rounding, sums over taps, scales, and what comes right after it.

Channels are the lanes of vectors.  A task computes a band of rows of outputs for some tiles of 16 channels: it writes
what these read as floats into the first-level cache, zeros around the image, and then each output is one multiplication
and addition a tap.  Sums of integers are exact in float32 up to 2 ** 24, which taps of bytes do not reach: one kernel
serves float weights, packed weights with float activations, and integers.  Two registers of floats are multiplied in a
cycle, where bytes would have to be interleaved by taps first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.activations import inverse_scale, on_grid, span_scale
from compressor.codegen.kernels.codes import code_quad, code_values, scale_values
from compressor.codegen.kernels.convolution.feeds import NAN, ZERO, Geometry
from compressor.codegen.kernels.convolution.kernel import Epilogue, finish, kernel_name
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.kernels.vector import (
    VECTOR,
    emit_tree,
    finite_size,
    ramp,
    registers,
    size_bits,
    splat,
    splat_float,
)
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS

_BAND_BYTES = 16384
"""Bytes of floats for each task and tile."""
_TASK_TILES = 4
"""Tiles a task, whose bytes make up a cache line of an image."""
_LARGEST_SUM = 1 << 24
_EVERY = (0, 1, VECTOR)


def supports(fmt: Format | None, taps: int) -> str:
    """Say why :func:`depthwise` has no kernel; an empty text if it has.  None stands for float32 weights."""
    if fmt is None:
        return ""
    act = fmt.activations
    if not fmt.symmetric or fmt.codebook or fmt.bit_planes or fmt.extras or fmt.scale_type == "E4M3" or fmt.block_tiles:
        return f"{fmt.name} is more than symmetric codes with a scale a channel"
    if fmt.groups(taps) != 1:
        return f"{fmt.name} has scales of groups of fewer than {taps} taps"
    if act is not None and (act.element is not None or act.is_sign or act.group_size):
        return f"{fmt.name} rounds activations to other numbers than integers with one scale a row"
    if fmt.integer_products and taps * 255 * 128 > _LARGEST_SUM:
        return f"sums over {taps} taps may not be exact"
    return ""


def depthwise_name(geometry: Geometry, fmt: Format | None, has_bias: bool, is_rounded: bool, epilogue: Epilogue) -> str:
    """Return the kernel's name."""
    stored = "float32" if fmt is None else fmt.name
    return kernel_name("depthwise", str(geometry.channels), geometry, stored, has_bias, is_rounded, epilogue)


def depthwise(
    geometry: Geometry, fmt: Format | None, has_bias: bool, is_rounded: bool, epilogue: Epilogue, isa: Isa
) -> tvm.tirx.PrimFunc:
    """TIR for ``depthwise_linear`` (``fmt`` is None) or ``packed_depthwise`` over patches.

    Parameters of the result: as of :func:`compressor.codegen.kernels.convolution.kernel.convolution`; without a format,
    the weight float32 [channels, taps] in place of parts.
    """
    (high, wide), (out_high, out_wide), channels = geometry.size, geometry.outputs, geometry.channels
    taps, tiles = geometry.kernel[0] * geometry.kernel[1], -(-channels // TILE_ROWS)
    parts = {"weight": ("float32", (channels, taps))} if fmt is None else fmt.parts(channels, taps)
    act = None if fmt is None else fmt.activations
    is_by_row = act is not None and act.granularity == "token"
    rows = _band_rows(geometry)
    bands = -(-out_high // rows)
    each = tiles if is_by_row else next(n for n in range(min(_TASK_TILES, tiles), 0, -1) if tiles % n == 0)
    groups, next_act = tiles // each, epilogue.next_activations
    kind, y_kind = ("int8" if is_bytes else "float32" for is_bytes in (is_rounded, next_act is not None))

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        n = T.int64()
        shape = T.meta_var((n, out_high, out_wide, channels))
        flat = T.meta_var((n * out_high * out_wide, channels))
        x4 = T.meta_var(parameter((n, high, wide, channels), kind))
        stored = T.meta_var({name: parameter(size, part) for name, (part, size) in parts.items()})
        bias = T.meta_var(parameter((channels,), "float32") if has_bias else None)
        residual4 = T.meta_var(parameter(shape, "float32") if epilogue.has_residual else None)
        next_scale = T.meta_var(parameter((1,), "float32") if next_act is not None else None)
        y4 = T.meta_var(parameter(shape, y_kind))
        x = T.decl_buffer((n * high * wide, channels), kind, data=x4.data)
        y = T.decl_buffer(flat, y_kind, data=y4.data)
        residual = T.meta_var(T.decl_buffer(flat, "float32", data=residual4.data) if epilogue.has_residual else None)

        @T.inline
        def compute(task):
            # A band of an image, of some tiles.
            image = T.meta_var(task // groups // bands)
            first_row = T.meta_var(task // groups % bands * rows)
            band = T.meta_var(_Band(geometry, fmt, act, isa, rows, image, first_row, x, stored, is_rounded))
            end = T.meta_var((epilogue, bias, residual, next_scale, y))
            band.compute(task % groups * each, each, tiles, end)

        if n * bands * groups == 1:  # waking threads would take longer
            compute(T.int64(0))
        else:
            for task in T.parallel(n * bands * groups):
                compute(task)

    return kernel


def _band_rows(geometry: Geometry) -> int:
    """Rows of outputs a task."""
    row_bytes = 4 * VECTOR * (geometry.size[1] + 2 * geometry.padding[1])
    most = (_BAND_BYTES // row_bytes - (geometry.kernel[0] - 1) * geometry.dilation[0] - 1) // geometry.stride[0] + 1
    return geometry.band(most, geometry.least_bands)


def _outputs_at_once(wide: int, isa: Isa) -> int:
    """Return how many neighbours are summed side by side: each is a chain of additions that wait for each other."""
    most = min(wide, isa.lanes // 2)
    return min(range(-(-most // 2), most + 1), key=lambda count: (-(-wide // count) * count, -count))


@dataclass
class _Band:
    """Rows of outputs of an image, and what they read."""

    geometry: Geometry
    fmt: Format | None
    act: Activations | None
    isa: Isa
    rows: int
    image: Any
    first_row: Any
    x: Any  # [pixels, channels]
    stored: Any
    is_rounded: bool

    def compute(self, first_tile: Any, n_tiles: int, tiles: int, end: Any) -> None:
        """Emit the outputs of some tiles of channels, the last of which may be ragged."""
        geometry = self.geometry
        self.begin = self.first_row * geometry.stride[0] - geometry.padding[0]
        self.size = (geometry.read_rows(self.rows), geometry.size[1] + 2 * geometry.padding[1])
        self.zero = -float(ZERO) if self.is_rounded else 0.0  # of bytes, which are codes + 128
        (self.least,) = registers(1, (VECTOR,), "uint8")
        self.values = T.alloc_buffer((self.size[0] * self.size[1], VECTOR), "float32")
        (self.inverse,) = registers(1, (1,))
        (self.next_inverse,) = registers(1, (1,))
        self.is_by_row = self.act is not None and self.act.granularity == "token"
        if self.is_by_row:
            self._row_scales()
        elif self.act is not None:
            T.buffer_store(self.inverse, inverse_scale(self.stored["input_scale"][0]), [0])
        if end[3] is not None:
            T.buffer_store(self.next_inverse, inverse_scale(end[3][0]), [0])
        tail = geometry.channels % VECTOR
        with T.serial(0, n_tiles) as i:
            if not tail:
                self._tile(first_tile + i, VECTOR, end)
                return
            with T.If(first_tile + i < tiles - 1):
                with T.Then():
                    self._tile(first_tile + i, VECTOR, end)
                with T.Else():
                    self._tile(T.int64(tiles - 1), tail, end)

    def _pixel(self, i: Any, j: Any) -> tuple[Any, Any]:
        """Return where a place of the band lies in the images, and whether it lies in this one."""
        (high, wide), h, w = self.geometry.size, self.begin + i, j - self.geometry.padding[1]
        inside = T.And(T.And(h >= 0, h < high), T.And(w >= 0, w < wide))
        return (self.image * high + h) * wide + w, inside

    def _row_scales(self) -> None:
        """Emit the scale of each output's row of patches, from the largest sizes of the pixels that it reads."""
        channels, (kh, kw), (sh, sw) = self.geometry.channels, self.geometry.kernel, self.geometry.stride
        (dh, dw), wide = self.geometry.dilation, self.geometry.outputs[1]
        peaks = T.alloc_buffer(self.size, "int32")
        self.scales = T.alloc_buffer((self.rows * wide,), "float32")
        (lane,) = registers(1, (VECTOR,), "int32")
        every = T.ramp(*_EVERY)
        with T.serial(0, self.size[0]) as i, T.serial(0, self.size[1]) as j:
            pixel, inside = self._pixel(i, j)
            T.buffer_store(peaks, T.int32(0), [i, j])
            with T.If(inside), T.Then():
                T.buffer_store(lane, splat(0, VECTOR), [every])
                with T.serial(0, channels // VECTOR) as k:
                    sizes = size_bits(self.x[pixel, T.ramp(k * VECTOR, 1, VECTOR)], VECTOR)
                    T.buffer_store(lane, T.max(lane[every], sizes), [every])
                with T.serial(channels // VECTOR * VECTOR, channels) as c:
                    T.buffer_store(lane, T.max(lane[0], size_bits(self.x[pixel, c], 1)), [0])
                emit_tree(T.max, lane, VECTOR)
                T.buffer_store(peaks, lane[0], [i, j])
        assert self.act is not None
        with T.serial(0, self.rows) as r, T.serial(0, wide) as q:
            T.buffer_store(lane, T.int32(0), [0])
            with T.serial(0, kh) as a, T.serial(0, kw) as b:
                T.buffer_store(lane, T.max(lane[0], peaks[r * sh + a * dh, q * sw + b * dw]), [0])
            top = finite_size(lane[0])
            T.buffer_store(self.scales, span_scale(top, self.act, None), [r * wide + q])

    def _tile(self, tile: Any, lanes: int, end: Any) -> None:
        """Emit the outputs of one tile, of which ``lanes`` channels exist."""
        self._fill(tile * TILE_ROWS, lanes)
        weights, scale = self._weights(tile, lanes)
        (out_high, out_wide), (_, bias, _, _, y) = self.geometry.outputs, end
        (total,), (shift,) = registers(1, (VECTOR,)), registers(1, (VECTOR,))
        self._load(shift, lambda c: T.float32(0) if bias is None else bias[c], tile * TILE_ROWS, lanes)
        start = self._start(weights, scale)
        count, every = _outputs_at_once(out_wide, self.isa), T.ramp(*_EVERY)
        sums = registers(count, (VECTOR,))
        rows = T.min(T.int64(self.rows), out_high - self.first_row)
        with T.serial(0, rows) as r, T.serial(0, -(-out_wide // count)) as k:
            q = T.min(k * count, T.int64(out_wide - count))  # the last ones may be computed twice
            self._sum(sums, weights, start, r, q)
            for t in range(count):
                m, factor = (self.image * out_high + self.first_row + r) * out_wide + q + t, scale[every]
                if self.is_by_row:
                    factor = factor * T.broadcast(self.scales[r * out_wide + q + t], VECTOR)
                value = sums[t][every] * factor + shift[every]
                if lanes == VECTOR:
                    at = T.ramp(tile * TILE_ROWS, 1, VECTOR)
                    T.buffer_store(y, self._finished(value, end, m, at, VECTOR), [m, at])
                else:
                    T.buffer_store(total, value, [every])
                    with T.serial(0, lanes) as lane:
                        c = tile * TILE_ROWS + lane
                        T.buffer_store(y, self._finished(total[lane], end, m, c, 1), [m, c])

    def _sum(self, sums: list[Any], weights: list[Any], start: Any, r: Any, q: Any) -> None:
        """Emit the sums of neighbouring outputs, from ``q`` in row ``r`` of the band, tap by tap."""
        geometry, every, count = self.geometry, T.ramp(*_EVERY), len(sums)
        (kh, kw), (sh, sw), (dh, dw) = geometry.kernel, geometry.stride, geometry.dilation
        inverses = registers(count, (1,))
        for t in range(count):
            T.buffer_store(sums[t], start[every], [every])
            if self.is_by_row:
                T.buffer_store(inverses[t], inverse_scale(self.scales[r * geometry.outputs[1] + q + t]), [0])
        for tap, (i, j) in enumerate((i, j) for i in range(kh) for j in range(kw)):
            for t in range(count):
                value = self.values[(r * sh + i * dh) * self.size[1] + (q + t) * sw + j * dw, every]
                if self.is_by_row:
                    value = on_grid(value, inverses[t][0], self.act, VECTOR)  # type: ignore[arg-type]
                T.buffer_store(sums[t], sums[t][every] + value * weights[tap][every], [every])

    def _start(self, weights: list[Any], scale: Any) -> Any:
        """Emit where sums begin, minus what the 128 of each byte adds; of bytes with a NaN, the scale is NaN."""
        every, (start,) = T.ramp(*_EVERY), registers(1, (VECTOR,))
        T.buffer_store(start, splat_float(0.0, VECTOR), [every])
        if self.is_rounded:
            for weight in weights:
                T.buffer_store(start, start[every] - weight[every] * splat_float(self.zero, VECTOR), [every])
            emit_tree(T.min, self.least, VECTOR)
            with T.If(self.least[0] == T.uint8(NAN)), T.Then():
                T.buffer_store(scale, splat_float(math.nan, VECTOR), [every])
        return start

    def _finished(self, value: Any, end: Any, m: Any, at: Any, lanes: int) -> Any:
        epilogue, _, residual, _, _ = end
        return finish(value, epilogue, residual, self.next_inverse[0], m, at, lanes)

    def _fill(self, first: Any, lanes: int) -> None:
        """Emit what the band reads, of some channels: bytes as they are, floats rounded where one scale is known."""
        geometry, wide = self.geometry, self.size[1]
        pad = geometry.padding[1]

        def clear(place: Any, count: int) -> None:
            with T.serial(0, count) as j:
                T.buffer_store(self.values, splat_float(self.zero, VECTOR), [place + j, T.ramp(*_EVERY)])

        if self.is_rounded:
            T.buffer_store(self.least, T.broadcast(T.uint8(255), VECTOR), [T.ramp(*_EVERY)])
        with T.serial(0, self.size[0]) as i:
            h = self.begin + i
            with T.If(T.And(h >= 0, h < geometry.size[0])):
                with T.Then():
                    clear(i * wide, pad)
                    with T.serial(0, geometry.size[1]) as w:
                        pixel = (self.image * geometry.size[0] + h) * geometry.size[1] + w
                        if lanes == VECTOR:
                            self._take(pixel, i * wide + pad + w, first, 0, VECTOR)
                        else:
                            with T.serial(0, lanes) as k:
                                self._take(pixel, i * wide + pad + w, first, k, 1)
                    clear(i * wide + pad + geometry.size[1], pad)
                with T.Else():
                    clear(i * wide, wide)

    def _take(self, pixel: Any, place: Any, first: Any, k: Any, lanes: int) -> None:
        """Emit some channels of a pixel, from the tile's channel ``k`` on."""
        at, stored = ramp(k, lanes), self.x[pixel, ramp(first + k, lanes)]
        if self.is_rounded:
            kinds = [kind if lanes == 1 else f"{kind}x{lanes}" for kind in ("uint8", "int32", "float32")]
            byte = T.reinterpret(stored, dtype=kinds[0])
            T.buffer_store(self.least, T.min(self.least[at], byte), [at])
            wide, convert = T.Cast(kinds[1], byte), self.isa.byte_floats
            stored = T.Cast(kinds[2], wide) if convert is None or lanes == 1 else convert(wide)
        elif self.act is not None and self.act.granularity == "tensor":
            stored = on_grid(stored, self.inverse[0], self.act, lanes)
        T.buffer_store(self.values, stored, [place, at])

    def _weights(self, tile: Any, lanes: int) -> tuple[list[Any], Any]:
        """Emit the tile's weights, a register a tap, and what its sums are multiplied by."""
        fmt, every = self.fmt, T.ramp(*_EVERY)
        taps = self.geometry.kernel[0] * self.geometry.kernel[1]
        weights, (scale,) = registers(taps, (VECTOR,)), registers(1, (VECTOR,))
        if fmt is None:
            for t in range(taps):
                self._load(weights[t], lambda c, t=t: self.stored["weight"][c, t], tile * TILE_ROWS, lanes)
            T.buffer_store(scale, splat_float(1.0, VECTOR), [every])
            return weights, scale
        quads = fmt.chunk_columns // 4
        for part in range(0, VECTOR, self.isa.lanes):
            at = T.ramp(part, 1, self.isa.lanes)
            for t in range(taps):
                chunk, quad = divmod(t // 4, quads)
                codes = code_quad(
                    lambda w, c=chunk, at=at: self.stored["codes"][tile, c, w, at], fmt, quad, self.isa.lanes
                )
                value = code_values(codes, t % 4, fmt, self.isa, lambda _: None)
                if fmt.element is None:
                    value = value - splat_float(fmt.zero_point, self.isa.lanes)
                T.buffer_store(weights[t], value, [at])
            value = scale_values(self.stored["scales"][tile, 0, at], fmt, self.isa.lanes)
            if self.act is not None and self.act.granularity == "tensor":
                value = value * T.broadcast(self.stored["input_scale"][0], self.isa.lanes)
            T.buffer_store(scale, value, [at])
        return weights, scale

    def _load(self, into: Any, read: Any, first: Any, lanes: int) -> None:
        """Emit loads of one number a channel, lane by lane; zeros in lanes without a channel."""
        T.buffer_store(into, splat_float(0.0, VECTOR), [T.ramp(*_EVERY)])
        with T.serial(0, lanes) as k:
            T.buffer_store(into, read(first + k), [k])
