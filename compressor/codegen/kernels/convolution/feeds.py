"""What the products of a convolution read: bytes, and where those of each output lie.

A task computes some rows of outputs of one image, its band.  First it rounds what these read into bytes, each a code +
128: products of unsigned and signed bytes are what ``vpdpbusd`` has, and what the 128 add is known before.  Output
``q`` of a band reads ``runs`` runs of ``run_bytes`` bytes, ``offset(run)`` behind ``q * step``.  Rows of outputs are
``pitch`` apart; what lies between the last of a row and the next row is not an output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.kernels.activations import inverse_scale, span_scale
from compressor.codegen.kernels.amx import SIDE
from compressor.codegen.kernels.vector import (
    VECTOR,
    at_least,
    at_most,
    emit_tree,
    finite_size,
    registers,
    size_bits,
    splat_float,
    widen,
)
from compressor.formats.activations import Activations
from compressor.ops.patches import outputs

RUN_BYTES = 64
"""Products take so many bytes at once; what lies between a run's end and a multiple of it meets weights of zero."""
ZERO = -128
"""The byte of a zero, as int8."""
NAN = 0
"""The byte of NaN, which codes from -127 to 127 leave free.  A band that reads one has outputs of NaN alone."""
_BAND_BYTES = 16384
"""Of what a band reads, so that it stays in the first-level cache."""
_BAND_ROWS, _BAND_OUTPUTS, _MOST_BANDS = 7, 96, 8
_ROUNDING = 1.5 * 2.0**23 - ZERO


@dataclass(frozen=True)
class Geometry:
    """A 2-d convolution of images [height, width, channels]; pairs are of rows and columns."""

    size: tuple[int, int]
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def outputs(self) -> tuple[int, int]:
        """Rows and columns of outputs."""
        each = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        high, wide = (outputs(*numbers) for numbers in each)
        return high, wide

    @property
    def columns(self) -> int:
        """Of the weight."""
        return self.kernel[0] * self.kernel[1] * self.channels

    @property
    def least_bands(self) -> int:
        """How many bands threads may share: of outputs enough to turn the weight into bytes for each."""
        high, wide = self.outputs
        return min(_MOST_BANDS, high // _BAND_ROWS, high * wide // _BAND_OUTPUTS) // 2 * 2 or 1

    def band(self, most_rows: int, least: int = 1) -> int:
        """Rows of outputs a task, ``most_rows`` at most; bands are as even as can be, and several are an even number.

        Args:
            least: bands.
        """
        bands = max(least, -(-self.outputs[0] // max(1, most_rows)))
        return -(-self.outputs[0] // (bands if least == 1 else -(-bands // 2) * 2))

    def read_rows(self, rows: int) -> int:
        """Rows of the image that so many rows of outputs read, padding included."""
        return (rows - 1) * self.stride[0] + (self.kernel[0] - 1) * self.dilation[0] + 1


class ImageFeed:
    """The image itself, where one scale that is known before serves all outputs: their patches overlap in it.

    Channels are filled up to a multiple of four.  Between two rows lie as many zeros as pad one side: the right end of
    one is the left end of the next.
    """

    def __init__(
        self, geometry: Geometry, act: Activations, *, is_rounded: bool, is_planar: bool = False, bands: int = 1
    ) -> None:
        """Lay out the bytes of a band.

        Args:
            is_rounded: images come as bytes already.
            is_planar: they come as planes of up to four channels, floats.
            bands: of an image, at least.
        """
        self.geometry, self.act, self.is_rounded, self.is_planar = geometry, act, is_rounded, is_planar
        (kh, kw), pw, (dh, dw) = geometry.kernel, geometry.padding[1], geometry.dilation
        self.pixel = -(-geometry.channels // 4) * 4
        self.pitch = max(geometry.size[1] + pw, geometry.outputs[1])
        self.step = geometry.stride[1] * self.pixel
        self._taps = kw if dw == 1 else 1  # in one run
        self.runs, self.run_bytes = kh * kw // self._taps, self._taps * self.pixel
        self._down, self._along = dh * self.pitch * self.pixel, dw * self.pixel
        row_bytes = geometry.stride[0] * self.pitch * self.pixel
        self.band, wide = geometry.band(_BAND_BYTES // row_bytes, bands), geometry.outputs[1]
        # Blocks of 16 outputs run across the gaps between rows, or begin anew with each row if these are fewer.
        self._row_blocks = -(-wide // SIDE)
        self._goes_on = -(-((self.band - 1) * self.pitch + wide) // SIDE) <= self.band * self._row_blocks
        image = (geometry.read_rows(self.band) * self.pitch + pw) * self.pixel
        last = self.first(self.blocks(self.band)) + SIDE  # one block more, since products take two
        reach = last * self.step + (kh - 1) * self._down + (kw - 1) * self._along + 2 * RUN_BYTES
        self.size = -(-max(image, reach) // RUN_BYTES) * RUN_BYTES
        self.factors = 1

    def column(self, run: int, byte: int) -> int | None:
        """Return the column of the weight that a byte of a run meets; None where the run is padding."""
        tap, channel = divmod(byte, self.pixel)
        c = self.geometry.channels
        return (run * self._taps + tap) * c + channel if channel < c and byte < self.run_bytes else None

    def offset(self, run: Any) -> Any:
        """Where a run begins."""
        each = self.geometry.kernel[1] // self._taps
        return run // each * self._down + run % each * self._along

    def blocks(self, rows: int) -> int:
        """Blocks of 16 outputs in so many rows."""
        if self._goes_on:
            return -(-((rows - 1) * self.pitch + self.geometry.outputs[1]) // SIDE)
        return rows * self._row_blocks

    def first(self, block: Any) -> Any:
        """Return the first output of a block."""
        if self._goes_on:
            return block * SIDE
        return block // self._row_blocks * self.pitch + block % self._row_blocks * SIDE

    def fill(self, factor: Any, x: Any, image: Any, first_row: Any, _rows: Any, input_scale: Any) -> tuple[Any, Any]:
        """Emit what writes the bytes of a band, and its scales; return where they are: a buffer, and the first of them.

        Args:
            factor: float32 [factors].
            x: all images, float32 or int8 [n * height * width * channels].
            first_row: of the outputs.
            input_scale: where it is calibrated.
        """
        (high, wide), c = self.geometry.size, self.geometry.channels
        feed = T.alloc_buffer((self.size,), "int8")
        _clear(feed, self.size)
        (kept,) = registers(1, (1,))
        T.buffer_store(kept, inverse_scale(input_scale), [0])
        inverse = kept[0]
        begin = first_row * self.geometry.stride[0] - self.geometry.padding[0]
        with T.serial(0, self.geometry.read_rows(self.band)) as i:
            inside = T.And(begin + i >= 0, begin + i < high)
            with T.If(inside), T.Then():
                to = (i * self.pitch + self.geometry.padding[1]) * self.pixel
                read = (image * high + begin + i) * wide * c
                if self.is_planar:
                    first = image * c * high + begin + i
                    self._interleave(feed, to, x, [(first + high * k) * wide for k in range(c)], inverse)
                elif self.pixel == c:
                    self._copy(feed, to, x, read, wide * c, inverse)
                else:
                    with T.serial(0, wide) as w:
                        self._copy(feed, to + w * self.pixel, x, read + w * c, c, inverse)
        is_broken = has_nan(feed, 0, self.size, RUN_BYTES)
        T.buffer_store(factor, T.if_then_else(is_broken, T.float32(math.nan), input_scale), [0])
        return feed, 0

    def _copy(self, feed: Any, to: Any, x: Any, read: Any, length: int, inverse: Any) -> None:
        if self.is_rounded:
            _each(length, lambda k, lanes: T.buffer_store(feed, x[_at(read + k, lanes)], [_at(to + k, lanes)]), 4)
        else:
            _round(feed, to, x, read, length, inverse, self.act)

    def _interleave(self, feed: Any, to: Any, x: Any, planes: Sequence[Any], inverse: Any) -> None:
        """Emit a row of pixels of four bytes, from the row of each plane."""

        def pixels(k: Any, lanes: int) -> None:
            blank = int.from_bytes([0] * len(planes) + [ZERO & 0xFF] * (4 - len(planes)), "little", signed=True)
            word = widen(T.int32(blank), lanes)
            for place, plane in enumerate(planes):
                bits = _byte_bits(x[_at(plane + k, lanes)], inverse, self.act, lanes)
                value = T.bitwise_and(bits, widen(T.int32(0xFF), lanes))
                word = T.bitwise_or(word, T.shift_left(value, widen(T.int32(8 * place), lanes)))
            four = T.reinterpret(word, dtype=f"int8x{4 * lanes}")
            T.buffer_store(feed, four, [T.ramp(to + 4 * k, 1, 4 * lanes)])

        _each(self.geometry.size[1], pixels, 1)


class PatchFeed:
    """What each output reads, one after the other, where each has a scale of its own."""

    def __init__(self, geometry: Geometry, act: Activations) -> None:
        self.geometry, self.act = geometry, act
        self.runs, self.run_bytes = 1, geometry.columns
        # A cache line more than whole runs, so that the outputs of a block do not meet in the same sets of the cache.
        self.step = (-(-geometry.columns // RUN_BYTES) + 1) * RUN_BYTES
        self.pitch = geometry.outputs[1]
        self.band = geometry.band(_BAND_BYTES // (self.pitch * self.step))
        self._pixels = (geometry.read_rows(self.band), geometry.size[1] + 2 * geometry.padding[1])
        self.size = (self.blocks(self.band) + 1) * SIDE * self.step
        self.factors = self.band * self.pitch

    def column(self, run: int, byte: int) -> int | None:
        """As :meth:`ImageFeed.column`."""
        return byte if byte < self.run_bytes else None

    def offset(self, run: Any) -> Any:
        """As :meth:`ImageFeed.offset`."""
        return 0

    def blocks(self, rows: int) -> int:
        """As :meth:`ImageFeed.blocks`."""
        return -(-rows * self.pitch // SIDE)

    def first(self, block: Any) -> Any:
        """As :meth:`ImageFeed.first`."""
        return block * SIDE

    def fill(self, factor: Any, x: Any, image: Any, first_row: Any, _rows: Any, input_scale: Any) -> tuple[Any, Any]:
        """As :meth:`ImageFeed.fill`; ``x`` is float32."""
        geometry, feed = self.geometry, T.alloc_buffer((self.size,), "int8")
        (high, wide), c, (kh, kw) = geometry.size, geometry.channels, geometry.kernel
        (sh, sw), (ph, pw), (dh, dw) = geometry.stride, geometry.padding, geometry.dilation
        peaks = T.alloc_buffer(self._pixels, "int32")  # of each pixel, in bits; zeros around the image
        (lane,), (inverse,) = registers(1, (VECTOR,), "int32"), registers(1, (1,))
        begin = first_row * sh - ph
        _clear(feed, self.size)
        with T.serial(0, self._pixels[0]) as i, T.serial(0, self._pixels[1]) as j:
            h, w = begin + i, j - pw
            T.buffer_store(peaks, T.int32(0), [i, j])
            with T.If(_inside(h, high, w, wide)), T.Then():
                read = ((image * high + h) * wide + w) * c
                every = T.ramp(0, 1, VECTOR)
                T.buffer_store(lane, T.broadcast(T.int32(0), VECTOR), [every])

                def largest(k: Any, lanes: int) -> None:
                    at = _at(0, lanes)
                    T.buffer_store(lane, T.max(lane[at], size_bits(x[_at(read + k, lanes)], lanes)), [at])

                _each(c, largest, 1)
                emit_tree(T.max, lane, VECTOR)
                T.buffer_store(peaks, lane[0], [i, j])
        with T.serial(0, self.band) as r, T.serial(0, self.pitch) as q:
            out = r * self.pitch + q
            taps = [peaks[r * sh + i * dh, q * sw + j * dw] for i in range(kh) for j in range(kw)]
            top = finite_size(reduce(T.max, taps))
            T.buffer_store(factor, span_scale(top, self.act, input_scale), [out])
            T.buffer_store(inverse, inverse_scale(factor[out]), [0])
            with T.serial(0, kh) as i, T.serial(0, kw) as j:
                h, w = begin + r * sh + i * dh, q * sw + j * dw - pw
                with T.If(_inside(h, high, w, wide)), T.Then():
                    read = ((image * high + h) * wide + w) * c
                    _round(feed, out * self.step + (i * kw + j) * c, x, read, c, inverse[0], self.act)
        return feed, 0


def to_byte(x: Any, inverse: Any, act: Activations, lanes: int, *, is_positive: bool = False) -> Any:
    """Round activations to bytes: each its code + 128, NaN :data:`NAN`; ``is_positive``: none is below zero."""
    kind = f"int8x{lanes}" if lanes > 1 else "int8"
    return T.Cast(kind, _byte_bits(x, inverse, act, lanes, is_positive))


def _byte_bits(x: Any, inverse: Any, act: Activations, lanes: int, is_positive: bool = False) -> Any:
    """Return int32 whose lowest byte is that of :func:`to_byte`.

    A float32 of 2 ** 23 to 2 ** 24 has steps of one, so that adding one rounds as :func:`on_grid` does, to even, and
    leaves the code in the lowest bits.  The last maximum makes -128 of NaN, of whatever bits.
    """
    number = x * widen(inverse, lanes)
    if not is_positive:
        number = at_least(number, -act.max_value, lanes)
    number = T.max(at_most(number, act.max_value, lanes), splat_float(ZERO, lanes))
    return T.reinterpret(number + splat_float(_ROUNDING, lanes), dtype=f"int32x{lanes}" if lanes > 1 else "int32")


def _at(first: Any, lanes: int) -> Any:
    return T.ramp(first, 1, lanes) if lanes > 1 else first


def _each(length: int, emit: Any, widen: int) -> None:
    """Emit loops over ``length`` elements: by vectors of ``16 * widen``, of 16, and what is left by powers of two."""
    done = 0
    for lanes in dict.fromkeys((VECTOR * widen, VECTOR, 8, 4, 2, 1)):
        count = (length - done) // lanes
        if count:
            with T.serial(0, count) as k:
                emit(done + k * lanes, lanes)
        done += count * lanes


def _round(feed: Any, to: Any, x: Any, read: Any, length: int, inverse: Any, act: Activations) -> None:
    def one(k: Any, lanes: int) -> None:
        T.buffer_store(feed, to_byte(x[_at(read + k, lanes)], inverse, act, lanes), [_at(to + k, lanes)])

    _each(length, one, 1)


def _clear(feed: Any, size: int) -> None:
    with T.serial(0, size // RUN_BYTES) as k:
        T.buffer_store(feed, T.broadcast(T.int8(ZERO), RUN_BYTES), [T.ramp(k * RUN_BYTES, 1, RUN_BYTES)])


def has_nan(source: Any, base: Any, length: Any, lanes: int) -> Any:
    """Emit what looks for :data:`NAN` among ``length`` bytes, a small part of what their products cost."""
    (least,) = registers(1, (lanes,), "uint8")
    every = T.ramp(0, 1, lanes)
    T.buffer_store(least, T.broadcast(T.uint8(255), lanes), [every])
    with T.serial(0, (length + (lanes - 1)) // lanes) as k:
        place = base + T.min(k * lanes, length - lanes)
        found = T.reinterpret(source[T.ramp(place, 1, lanes)], dtype=f"uint8x{lanes}")
        T.buffer_store(least, T.min(least[every], found), [every])
    emit_tree(T.min, least, lanes)
    return least[0] == T.uint8(NAN)


def _inside(h: Any, high: int, w: Any, wide: int) -> Any:
    return T.And(T.And(h >= 0, h < high), T.And(w >= 0, w < wide))


BandFeed = ImageFeed | PatchFeed
