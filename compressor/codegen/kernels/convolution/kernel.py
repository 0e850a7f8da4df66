"""A convolution of integers in one kernel: rounding, products, scales, and what comes right after it.

The weight is stored as that of the linear over patches that it is.  Where it has one scale a row, and activations one a
token or tensor, no patches are written: each thread rounds the rows of an image that it reads
(:mod:`compressor.codegen.kernels.convolution.feeds`) and multiplies what lies there, 16 outputs at once with AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from compressor.codegen.isa import Isa
from compressor.codegen.kernels.activations import inverse_scale
from compressor.codegen.kernels.codes import scale_values
from compressor.codegen.kernels.convolution import groups
from compressor.codegen.kernels.convolution.direct import DirectFeed, Feed
from compressor.codegen.kernels.convolution.dots import DotProducts
from compressor.codegen.kernels.convolution.feeds import (
    BandFeed,
    Geometry,
    ImageFeed,
    PatchFeed,
    to_byte,
)
from compressor.codegen.kernels.convolution.groups import GroupProducts
from compressor.codegen.kernels.convolution.products import TileProducts
from compressor.codegen.kernels.convolution.weights import is_aligned
from compressor.codegen.kernels.linear.weights import parameter
from compressor.codegen.kernels.vector import at_least, at_most, ramp, registers
from compressor.formats.activations import Activations
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.parts import TILE_ROWS
from compressor.formats.weights import ChannelScales, Integers, TensorScale

_MOST_GATHERED = 64
"""Words of a tile's weights that may be put together byte by byte; each is a few statements."""


@dataclass(frozen=True)
class Epilogue:
    """What happens to outputs before they are written.

    Attributes:
        has_residual: another tensor of their shape is added.
        is_relu: negative ones become zero, after that.
        ceiling: larger ones become this, after that (6 of ReLU6); None for no bound.
        next_activations: they are written as the bytes that the next convolution makes of its input; else as float32.
    """

    has_residual: bool = False
    is_relu: bool = False
    next_activations: Activations | None = None
    ceiling: float | None = None


def supports(fmt: Format, geometry: Geometry) -> str:
    """Say why :func:`convolution` has no kernel; an empty text if it has.

    Patches and a packed linear serve the others.
    """
    act, (down, along) = fmt.activations, geometry.stride
    if act is None or not fmt.integer_products or act.is_sign:
        return f"{fmt.name} does not multiply integers of 2 bits or more"
    blocks = fmt.extra(ColumnBlocks)
    if not isinstance(fmt.weights, Integers) or not fmt.weights.symmetric or len(fmt.extras) > (blocks is not None):
        return f"{fmt.name} is more than symmetric integers"
    if act.group_size or not isinstance(fmt.scales, ChannelScales | TensorScale):
        return f"{fmt.name} has scales of groups"
    if down != along:
        return f"strides {down} and {along} differ"
    feed = _feed(fmt, geometry, is_rounded=False)
    if blocks is not None:
        return groups.supports(blocks, geometry)
    words = feed.runs * -(-feed.run_bytes // 4)
    if not is_aligned(fmt, feed) and words > _MOST_GATHERED:
        return f"{words} words an output would be put together one by one"
    return ""


def reads_planes(fmt: Format, geometry: Geometry) -> bool:
    """Whether :func:`convolution` can read images that lie channel by channel, as a model's input does."""
    return fmt.activations is not None and fmt.activations.granularity == "tensor" and geometry.channels <= 4


def convolution_name(
    out_features: int, geometry: Geometry, fmt: Format, has_bias: bool, is_rounded: bool, epilogue: Epilogue
) -> str:
    """Return the kernel's name."""
    shape = f"{out_features}x{geometry.channels}"
    return kernel_name("convolution", shape, geometry, fmt.name, has_bias, is_rounded, epilogue)


def kernel_name(
    family: str, shape: str, geometry: Geometry, stored: str, has_bias: bool, is_rounded: bool, epilogue: Epilogue
) -> str:
    """Return the name of a kernel of convolutions."""
    pairs = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    name = f"{family}_{shape}_" + "_".join("x".join(map(str, pair)) for pair in pairs)
    marks = {
        "_bias": has_bias,
        "_bytes": is_rounded,
        "_add": epilogue.has_residual,
        "_relu": epilogue.is_relu,
        f"_at_most_{epilogue.ceiling}".replace(".", "p"): epilogue.ceiling is not None,
        "_round": epilogue.next_activations is not None,
    }
    size = "x".join(map(str, geometry.size))
    stored = stored.replace("@", "_zero").replace(".", "p")  # linkers read @ as a version
    return f"{name}_of_{size}_{stored}" + "".join(mark for mark, is_there in marks.items() if is_there)


def _feed(fmt: Format, geometry: Geometry, *, is_rounded: bool, is_planar: bool = False, bands: int = 1) -> BandFeed:
    assert fmt.activations is not None
    if fmt.activations.granularity == "tensor":
        return ImageFeed(geometry, fmt.activations, is_rounded=is_rounded, is_planar=is_planar, bands=bands)
    return PatchFeed(geometry, fmt.activations)


def _products(
    fmt: Format, geometry: Geometry, tiles: int, isa: Isa, is_rounded: bool, is_planar: bool
) -> TileProducts | DotProducts:
    if fmt.extra(ColumnBlocks) is None and isa.matrix_unit == "amx":
        return TileProducts(_feed(fmt, geometry, is_rounded=is_rounded, is_planar=is_planar), fmt, tiles, isa)
    products = DotProducts if fmt.extra(ColumnBlocks) is None else GroupProducts
    if is_rounded and DirectFeed.serves(geometry):
        return products(DirectFeed(geometry), fmt, tiles, isa)
    least = geometry.least_bands
    feed = _feed(fmt, geometry, is_rounded=is_rounded, is_planar=is_planar, bands=least)
    return products(feed, fmt, tiles, isa)


def convolution(
    out_features: int,
    geometry: Geometry,
    fmt: Format,
    has_bias: bool,
    is_rounded: bool,
    epilogue: Epilogue,
    isa: Isa,
    is_planar: bool = False,
) -> tvm.tirx.PrimFunc:
    """TIR for a packed linear over patches; ``is_planar``, which needs :func:`reads_planes`: x is [n, channels, height,
    width].

    Parameters of the result: x [n, height, width, channels], float32, or int8 where ``is_rounded``: as an
    :class:`Epilogue` wrote it; the weight's parts; bias (where there is one); residual float32 [n, rows, columns, out]
    and the next input's scale float32 [1] (where the epilogue has them); y float32 or int8 [n, rows, columns, out].
    """
    (high, wide), (out_high, out_wide) = geometry.size, geometry.outputs
    rows, channels, tiles = out_features, geometry.channels, -(-out_features // TILE_ROWS)
    parts = fmt.parts(out_features, geometry.columns)
    is_calibrated, has_residual, act = "input_scale" in parts, epilogue.has_residual, epilogue.next_activations
    kind, y_kind = ("int8" if is_bytes else "float32" for is_bytes in (is_rounded, act is not None))
    body = _products(fmt, geometry, tiles, isa, is_rounded, is_planar)
    feed = body.feed
    count = -(-out_high // body.band)  # of bands

    @T.prim_func(s_tir=True, private=True)
    def kernel() -> None:
        n = T.int64()
        shape = T.meta_var((n, out_high, out_wide, rows))
        flat = T.meta_var((n * out_high * out_wide, rows))
        x4 = T.meta_var(parameter((n, channels, high, wide) if is_planar else (n, high, wide, channels), kind))
        codes = T.meta_var(parameter(parts["codes"][1], "int32"))
        scales = T.meta_var(parameter(parts["scales"][1], "float16"))
        input_scale = T.meta_var(parameter((1,), "float32") if is_calibrated else None)
        kept = T.meta_var(parameter(parts["kept"][1], "uint8") if "kept" in parts else None)
        bias = T.meta_var(parameter((rows,), "float32") if has_bias else None)
        residual4 = T.meta_var(parameter(shape, "float32") if has_residual else None)
        next_scale = T.meta_var(parameter((1,), "float32") if act is not None else None)
        y4 = T.meta_var(parameter(shape, y_kind))
        x = T.decl_buffer((n * high * wide * channels,), kind, data=x4.data)
        y = T.decl_buffer(flat, y_kind, data=y4.data)
        residual = T.meta_var(T.decl_buffer(flat, "float32", data=residual4.data) if has_residual else None)

        @T.inline
        def compute(task):
            # A band of an image, and a part of the weight's rows.
            factor = T.alloc_buffer((feed.factors,), "float32")
            image = T.meta_var(task // body.chunks // count)
            first_row = T.meta_var(task // body.chunks % count * body.band)
            left = T.meta_var(T.min(T.int64(body.band), out_high - first_row))
            given = T.meta_var(input_scale[0] if is_calibrated else None)
            source, base = T.meta_var(feed.fill(factor, x, image, first_row, left, given))
            output = T.meta_var((image * out_high + first_row) * out_wide)
            end = T.meta_var(
                _End(epilogue, feed, fmt, isa, scales, factor, bias, residual, next_scale, y, output, left)
            )
            body.multiply(source, base, left, task % body.chunks, end)

        body.prepare(codes, kept)
        if n * count * body.chunks == 1:  # waking threads would take longer
            compute(T.int64(0))
        else:
            for task in T.parallel(n * count * body.chunks):
                compute(task)

    return kernel


@dataclass
class _End:
    """What becomes of sums: scales, the epilogue, and where they are written."""

    epilogue: Epilogue
    feed: Feed
    fmt: Format
    isa: Isa
    scales: Any
    factor: Any
    bias: Any
    residual: Any
    next_scale: Any
    y: Any  # [outputs, rows]
    output: Any  # the band's first
    rows: Any  # of outputs that the band has

    def start_tiles(self, first: Any, n_tiles: int) -> None:
        """Load what all outputs of these tiles share."""
        lanes = self.isa.lanes
        (self.scale,) = registers(1, (n_tiles, TILE_ROWS))
        for n in range(n_tiles):
            for part in range(0, TILE_ROWS, lanes):
                at = T.ramp(part, 1, lanes)
                scale = scale_values(self.scales[first + n, 0, at], self.fmt, lanes)
                if self.feed.factors == 1:
                    scale = scale * T.broadcast(self.factor[0], lanes)
                T.buffer_store(self.scale, scale, [n, at])
        if self.next_scale is not None:
            (self.inverse,) = registers(1, (1,))
            T.buffer_store(self.inverse, inverse_scale(self.next_scale[0]), [0])

    def write(self, q: Any, first: Any, total: Callable[[int, Any], Any]) -> None:
        """Write output ``q`` of the feed, if it is one: as :meth:`put`."""
        row, column = q // self.feed.pitch, q % self.feed.pitch
        wide = self.feed.geometry.outputs[1]
        with T.If(T.And(column < wide, row < self.rows)), T.Then():
            self.put(row * wide + column, q, first, total)

    def put(self, output: Any, q: Any, first: Any, total: Callable[[int, Any], Any]) -> None:
        """Write an output of the band, of some tiles.

        Args:
            q: its place in the feed.
            total: (tile, rows) -> its sums, int32.
        """
        n_tiles, lanes, m = int(self.scale.shape[0]), self.isa.lanes, self.output + output
        rows = int(self.y.shape[1])
        for n in range(n_tiles):
            for part in range(0, TILE_ROWS, lanes):
                at, begin = T.ramp(part, 1, lanes), (first + n) * TILE_ROWS + part
                scale = self.scale[n, at]
                if self.feed.factors > 1:
                    scale = scale * T.broadcast(self.factor[q], lanes)
                value = T.Cast(f"float32x{lanes}", total(n, at)) * scale
                if rows % TILE_ROWS == 0 or n < n_tiles - 1:
                    self._finish(value, m, begin, lanes)
                    continue
                with T.If(begin + lanes <= rows):
                    with T.Then():
                        self._finish(value, m, begin, lanes)
                    with T.Else():
                        self._finish_last(value, m, begin, min(rows % TILE_ROWS - part, lanes))

    def _finish_last(self, value: Any, m: Any, begin: Any, left: int) -> None:
        """Write the first ``left`` of a vector's outputs, by powers of two."""
        if left <= 0:
            T.evaluate(T.int32(0))
            return
        (lane,) = registers(1, (self.isa.lanes,))
        T.buffer_store(lane, value, [T.ramp(0, 1, self.isa.lanes)])
        done = 0
        for count in (8, 4, 2, 1):
            if left & count:
                self._finish(lane[ramp(done, count)], m, begin + done, count)
                done += count

    def _finish(self, value: Any, m: Any, begin: Any, lanes: int) -> None:
        at = ramp(begin, lanes)
        if self.bias is not None:
            value = value + self.bias[at]
        inverse = None if self.next_scale is None else self.inverse[0]
        T.buffer_store(self.y, finish(value, self.epilogue, self.residual, inverse, m, at, lanes), [m, at])


def finish(value: Any, epilogue: Epilogue, residual: Any, inverse: Any, m: Any, at: Any, lanes: int) -> Any:
    """Return what is written of outputs ``at`` of pixel ``m``.

    Args:
        residual: float32 [pixels, out], where the epilogue has one.
        inverse: of the next activations' scale, where it has some.
    """
    act = epilogue.next_activations
    if residual is not None:
        value = value + residual[m, at]
    if epilogue.is_relu:
        value = at_least(value, 0.0, lanes)
    if epilogue.ceiling is not None:
        value = at_most(value, epilogue.ceiling, lanes)
    return value if act is None else to_byte(value, inverse, act, lanes, is_positive=epilogue.is_relu)
