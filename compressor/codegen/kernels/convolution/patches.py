"""Patches of images as rows: what a convolution reads, gathered for the linear that it is."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm.script import tirx as T

from compressor.codegen.kernels.norm import PARALLEL_FROM
from compressor.codegen.kernels.vector import VECTOR


def patches(
    channels: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tvm.tirx.PrimFunc:
    """TIR for ``compressor.ops.patches.patches``.

    Parameters of the result: x float32 [n, height, width, channels], y float32 [n, rows, columns, kernel rows * kernel
    columns * channels].
    """
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    vectors, tail = channels // VECTOR, channels % VECTOR
    length = kh * kw * channels

    @T.prim_func(s_tir=True, private=True)
    def kernel_(x_: T.handle, y_: T.handle) -> None:
        n = T.int64()
        height = T.int64()
        width = T.int64()
        rows = T.int64()
        columns = T.int64()
        x4 = T.match_buffer(x_, (n, height, width, channels), "float32")
        y4 = T.match_buffer(y_, (n, rows, columns, length), "float32")
        x = T.decl_buffer((n * height * width, channels), "float32", data=x4.data)
        y = T.decl_buffer((n * rows * columns, length), "float32", data=y4.data)

        @T.inline
        def piece(m, first, inside, pixel):
            # The channels of one pixel, or zeros.
            if inside:
                for k in range(vectors):
                    y[m, T.ramp(first + k * VECTOR, 1, VECTOR)] = x[pixel, T.ramp(k * VECTOR, 1, VECTOR)]
                for k in range(tail):
                    y[m, first + vectors * VECTOR + k] = x[pixel, vectors * VECTOR + k]
            else:
                for k in range(vectors):
                    y[m, T.ramp(first + k * VECTOR, 1, VECTOR)] = T.broadcast(T.float32(0), VECTOR)
                for k in range(tail):
                    y[m, first + vectors * VECTOR + k] = T.float32(0)

        @T.inline
        def line(b):
            # One row of outputs of one image.
            for c in range(columns):
                for i in range(kh):
                    for j in range(kw):
                        h = T.meta_var(b % rows * sh + i * dh - ph)
                        w = T.meta_var(c * sw + j * dw - pw)
                        inside = T.meta_var(T.And(T.And(h >= 0, h < height), T.And(w >= 0, w < width)))
                        pixel = T.meta_var((b // rows * height + h) * width + w)
                        piece(b * columns + c, (i * kw + j) * channels, inside, pixel)

        with T.sblock("root"):  # TVM asks of every kernel of one operand whether it only reshapes, and expects a block
            if n * rows * columns * length >= PARALLEL_FROM:
                for b in T.parallel(n * rows):
                    line(b)
            else:
                for b in range(n * rows):
                    line(b)

    return kernel_
